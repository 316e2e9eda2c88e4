{{- /* The prefix of all names: the release's name, with "sluice" appended if it does not contain it. */}}
{{- define "sluice.name" -}}
{{- if contains "sluice" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-sluice" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* Labels of a process: (list . "worker"). Rules and dashboard know the jobs by app.kubernetes.io/name. */}}
{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{- /* "true" if each pod is a whole server. */}}
{{- define "sluice.allInOne" -}}
{{- if eq .Values.topology "all-in-one" }}true{{ end }}
{{- end }}

{{- /* The controller whose pods compute, which autoscalers scale. */}}
{{- define "sluice.computing" -}}
{{- if include "sluice.allInOne" . }}
{apiVersion: apps/v1, kind: Deployment, name: {{ include "sluice.name" . }}-server}
{{- else if gt (int .Values.worker.hosts) 1 }}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "sluice.name" . }}-worker}
{{- else }}
{apiVersion: apps/v1, kind: StatefulSet, name: {{ include "sluice.name" . }}-worker}
{{- end }}
{{- end }}

{{- /* The process that clients reach. */}}
{{- define "sluice.front" -}}
{{- ternary "server" "frontend" (eq .Values.topology "all-in-one") }}
{{- end }}

{{- /* An image: (list . "worker"). */}}
{{- define "sluice.image" -}}
{{- $root := index . 0 }}{{ $image := $root.Values.image }}{{ $process := index . 1 }}
{{- $variant := ternary "-cpu" "" (and (eq $process "worker") (eq $root.Values.device "cpu")) }}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ get $image $process }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ $variant }}
{{- end }}

{{- define "sluice.servedName" -}}
{{ .Values.model.servedName | default .Values.model.name }}
{{- end }}

{{- /* "true" if further workers compute long prompts for the others. */}}
{{- define "sluice.prefill" -}}
{{- if gt (int .Values.prefill.replicas) 0 }}true{{ end }}
{{- end }}

{{- /* The claim of the volume through which prompts travel between workers. */}}
{{- define "sluice.storeClaim" -}}
{{ .Values.prefill.store.existingClaim | default (printf "%s-kv" (include "sluice.name" .)) }}
{{- end }}

{{- /* Selects the pods of all workers that frontends connect to. */}}
{{- define "sluice.workers" -}}
matchLabels:
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/name, operator: In, values: [sluice-worker, sluice-prefill]}
{{- end }}

{{- /* "true" if all pods read the model from one volume. */}}
{{- define "sluice.shared" -}}
{{- if has .Values.modelVolume.mode (list "shared" "existing") }}true{{ end }}
{{- end }}

{{- define "sluice.modelClaim" -}}
{{- if eq .Values.modelVolume.mode "existing" }}{{ required "modelVolume.existingClaim names the claim of mode existing" .Values.modelVolume.existingClaim }}{{ else }}{{ include "sluice.name" . }}-model{{ end }}
{{- end }}

{{- /* The file that says that the volume holds this model. */}}
{{- define "sluice.marker" -}}
/models/.complete-{{ printf "%s@%s" .Values.model.name .Values.model.revision | sha256sum | trunc 12 }}
{{- end }}

{{- define "sluice.volumeSize" -}}
{{ .Values.modelVolume.sizeGb | default (ceil (addf 5 (mulf 1.2 .Values.model.weightsGb)) | int) }}Gi
{{- end }}

{{- /* Resources of a pod that computes: (list . "worker"). On a CPU, memory holds weights and K/V; each host of a worker has its part of them, and all embeddings. On a GPU, memory
   is needed only for the process and for reading files. An all-in-one pod has 2 GiB more, for its frontend. */}}
{{- define "sluice.workerResources" -}}
{{- $v := (index . 0).Values }}{{ $worker := include "sluice.workerValues" . | fromYaml }}
{{- $weights := $v.model.weightsGb }}{{ $shm := $worker.shmGb }}{{ $part := divf 1 $worker.hosts }}
{{- $frontend := ternary 2 0 (eq $v.topology "all-in-one") }}
{{- if $worker.resources }}{{ toYaml $worker.resources }}
{{- else if eq $v.device "cpu" }}
{{- $memory := printf "%dGi" (ceil (addf 3 (mulf (addf 0.1 $part) $weights) (mulf $part $v.model.kvCacheGb) $shm $frontend) | int) }}
requests: {cpu: {{ $worker.cpus | quote }}, memory: {{ $memory }}}
limits: {memory: {{ $memory }}}
{{- else }}
requests: {cpu: {{ $worker.cpus | quote }}, memory: {{ ceil (addf 4 (mulf 0.25 $weights) $shm $frontend) | int }}Gi}
limits: {memory: {{ ceil (addf 8 $weights $shm $frontend) | int }}Gi, {{ $worker.gpuResource }}: {{ $worker.gpus }}}
{{- end }}
{{- end }}

{{- /* Running requests for each worker; if the values state none, 3/4 of the default --max-batch-size. */}}
{{- define "sluice.runningPerWorker" -}}
{{ .Values.workerAutoscaling.runningPerWorker | default (ternary 192 48 (eq .Values.device "cuda")) }}
{{- end }}

{{- define "sluice.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "sluice.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "sluice.huggingFaceToken" -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.huggingFace.tokenSecret }}, key: token, optional: true}
{{- end }}

{{- /* Environment of frontends and workers. With a filled volume, nothing is requested from the hub. */}}
{{- define "sluice.env" -}}
{{- if include "sluice.shared" . }}
- {name: HF_HOME, value: /models}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- else }}
{{ include "sluice.huggingFaceToken" . }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Waits until the Job has filled the volume. */}}
{{- define "sluice.waitForModel" -}}
{{- $root := index . 0 }}
{{- if eq $root.Values.modelVolume.mode "shared" }}
initContainers:
  - name: wait-for-model
    image: {{ include "sluice.image" . }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [sh, -c, "until [ -e {{ include "sluice.marker" $root }} ]; do sleep 2; done"]
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext:
      {{- include "sluice.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- /* The values of the pods of a process that computes: (list . "worker"). "prefill" has those of .worker where .prefill.worker
   has no others. On GPUs, with a toleration of the taint that keeps other pods off nodes with GPUs. */}}
{{- define "sluice.workerValues" -}}
{{- $v := (index . 0).Values }}{{ $worker := deepCopy $v.worker }}
{{- if eq (index . 1) "prefill" }}
{{- $worker = mergeOverwrite $worker (deepCopy $v.prefill.worker) }}
{{- end }}
{{- if eq $v.device "cuda" }}
{{- $taint := dict "key" $worker.gpuResource "operator" "Exists" "effect" "NoSchedule" }}
{{- $_ := set $worker "tolerations" (prepend $worker.tolerations $taint) }}
{{- end }}
{{- toYaml $worker }}
{{- end }}

{{- /* The fields that decide on which node a pod runs: (list . .Values.worker). */}}
{{- define "sluice.placement" -}}
{{- $root := index . 0 }}{{ $process := index . 1 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $process.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $process.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $process.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with $process.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}
