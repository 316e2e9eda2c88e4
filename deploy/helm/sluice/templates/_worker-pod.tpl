{{- /* The pod of a worker: (list . "worker"), of a prefill worker: (list . "prefill"), or of a further rank: (list . "rank").
   A worker and its prefill workers write to one volume and never connect to each other. A rank computes a part of the model for a
   worker on another host, and has no sockets for frontends. If a rank hangs, its worker stops, and the worker's probe ends
   the group. */}}
{{- define "sluice.workerPod" -}}
{{- $root := index . 0 }}{{ $process := index . 1 }}{{ $v := $root.Values }}
{{- $serves := ne $process "rank" }}{{ $prefill := include "sluice.prefill" $root }}
{{- $worker := include "sluice.workerValues" . | fromYaml }}{{ $hosts := int $v.worker.hosts -}}
metadata:
  labels:
    {{- include "sluice.labels" (list $root $process) | nindent 4 }}
  annotations:
    checksum/settings: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum | trunc 16 }}
    {{- with $worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  enableServiceLinks: false  # otherwise variables such as SLUICE_WORKER_PORT appear, which look like settings
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $v.drainTimeoutSeconds 30 }}  # above --drain-timeout
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with include "sluice.placement" (list $root $worker) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  securityContext:
    {{- include "sluice.podSecurity" $root | nindent 4 }}
  {{- with include "sluice.waitForModel" (list $root "worker") | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ $process }}
      image: {{ include "sluice.image" (list $root "worker") }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - worker
        - --device={{ $v.device }}
        {{- if eq $v.device "cpu" }}
        - --kv-cache-gb={{ $v.model.kvCacheGb }}
        {{- end }}
        {{- if $serves }}
        - --request-address=tcp://0.0.0.0:5555
        - --event-address=tcp://0.0.0.0:5556
        {{- end }}
        - {{ ternary "--curve-dir=/keys" "--insecure" $v.keys.enabled }}
        {{- if gt $hosts 1 }}
        - --rank-group=lws
        - --tensor-parallel-size={{ $hosts }}
        {{- end }}
        {{- if $serves }}
        - --worker-host=0.0.0.0
        - --worker-metrics-port=8001
        {{- end }}
        {{- if $prefill }}
        - --role={{ ternary "prefill" "decode" (eq $process "prefill") }}
        - --kv-store=/kv/pages  # a folder that the worker makes itself: the volume's root may be writable for its group
        - --kv-store-gb={{ $v.prefill.store.sizeGb }}
        {{- end }}
        {{- range $worker.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      envFrom:
        - configMapRef: {name: {{ include "sluice.name" $root }}-settings}
      env:
        {{- include "sluice.env" $root | trim | nindent 8 }}
      {{- if $serves }}
      ports:
        - {name: requests, containerPort: 5555}
        - {name: events, containerPort: 5556}
        - {name: metrics, containerPort: 8001}
      {{- end }}
      resources:
        {{- include "sluice.workerResources" . | trim | nindent 8 }}
      {{- if $serves }}
      # /metrics opens when the weights are loaded.
      startupProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 4
        failureThreshold: {{ mul $worker.startupMinutes 12 }}
      readinessProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 4
      livenessProbe:  # detects a hang: streams wait during the restart and then continue
        exec:
          command: [sluice, probe, "http://127.0.0.1:8001/metrics", --max-step-age, "60"]
        periodSeconds: 10
        timeoutSeconds: 8
        failureThreshold: 3
      {{- end }}
      securityContext:
        {{- include "sluice.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        {{- if $v.keys.enabled }}
        - {name: keys, mountPath: /keys, readOnly: true}
        {{- end }}
        {{- if include "sluice.shared" $root }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $prefill }}
        - {name: kv, mountPath: /kv}
        {{- end }}
        - {name: cache, mountPath: /cache}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
  volumes:
    {{- if $v.keys.enabled }}
    - name: keys
      secret:
        secretName: {{ $v.keys.workerSecret }}
        defaultMode: 0440
        items:
          - {key: worker.key_secret, path: worker.key_secret}
          - {key: frontend.key, path: allowed/frontend.key}
    {{- end }}
    {{- if include "sluice.shared" $root }}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "sluice.modelClaim" $root }}, readOnly: true}
    {{- end }}
    {{- if $prefill }}
    - name: kv
      persistentVolumeClaim: {claimName: {{ include "sluice.storeClaim" $root }}}
    {{- end }}
    {{- if ne $v.modelVolume.mode "replica" }}
    - name: cache  # Triton's compiled kernels, and translated GGUF files
      emptyDir: {}
    {{- end }}
    - name: shm  # the default of 64 MiB is too small for torch's shared tensors; it counts as memory of the pod
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.shmGb }}Gi}
    - name: tmp
      emptyDir: {}
{{- end }}

{{- /* The name of all pods of (list . "worker") or (list . "prefill"), including loading ones, so that /ready can show progress. */}}
{{- define "sluice.workerService" -}}
{{- $root := index . 0 }}{{ $process := index . 1 -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "sluice.name" $root }}-{{ $process }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
spec:
  clusterIP: None
  ipFamilies: [IPv4]
  publishNotReadyAddresses: true
  selector:
    {{- include "sluice.labels" . | nindent 4 }}
  ports:
    - {name: requests, port: 5555}
    - {name: events, port: 5556}
    - {name: metrics, port: 8001}
{{- end }}

{{- /* The StatefulSet of (list . "worker") or (list . "prefill"). */}}
{{- define "sluice.workerSet" -}}
{{- $root := index . 0 }}{{ $process := index . 1 }}{{ $v := $root.Values -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "sluice.name" $root }}-{{ $process }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
spec:
  serviceName: {{ include "sluice.name" $root }}-{{ $process }}
  {{- if eq $process "prefill" }}
  replicas: {{ $v.prefill.replicas }}
  {{- else if eq $v.workerAutoscaling.kind "none" }}
  replicas: {{ $v.worker.replicas }}
  {{- end }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "sluice.labels" . | nindent 6 }}
  template:
    {{- include "sluice.workerPod" . | nindent 4 }}
  {{- if eq $v.modelVolume.mode "replica" }}
  volumeClaimTemplates:
    - metadata:
        name: cache
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $v.modelVolume.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests: {storage: {{ include "sluice.volumeSize" $root }}}
  {{- end }}
{{- end }}

{{- define "sluice.workerBudget" -}}
{{- $root := index . 0 }}{{ $process := index . 1 -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "sluice.name" $root }}-{{ $process }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "sluice.labels" . | nindent 6 }}
{{- end }}
