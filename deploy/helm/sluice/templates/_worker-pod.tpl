{{- /* The pod of a worker: (list . "worker"), or of a further rank: (list . "rank"). A rank computes a part of the model for a
   worker on another host, and has no sockets for frontends. If a rank hangs, its worker stops, and the worker's probe ends
   the group. */}}
{{- define "sluice.workerPod" -}}
{{- $root := index . 0 }}{{ $process := index . 1 }}{{ $v := $root.Values }}
{{- $serves := eq $process "worker" }}{{ $hosts := int $v.worker.hosts -}}
metadata:
  labels:
    {{- include "sluice.labels" (list $root $process) | nindent 4 }}
  annotations:
    checksum/settings: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum | trunc 16 }}
    {{- with $v.worker.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  enableServiceLinks: false  # otherwise variables such as SLUICE_WORKER_PORT appear, which look like settings
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $v.drainTimeoutSeconds 30 }}  # above --drain-timeout
  {{- with $v.worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with include "sluice.placement" (list $root (include "sluice.onGpuNodes" $root | fromYaml)) | trim }}
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
        {{- range $v.worker.extraArgs }}
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
        {{- include "sluice.workerResources" $root | trim | nindent 8 }}
      {{- if $serves }}
      # /metrics opens when the weights are loaded.
      startupProbe:
        httpGet: {path: /metrics, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 4
        failureThreshold: {{ mul $v.worker.startupMinutes 12 }}
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
    {{- if ne $v.modelVolume.mode "replica" }}
    - name: cache  # Triton's compiled kernels, and translated GGUF files
      emptyDir: {}
    {{- end }}
    - name: shm  # the default of 64 MiB is too small for torch's shared tensors; it counts as memory of the pod
      emptyDir: {medium: Memory, sizeLimit: {{ $v.worker.shmGb }}Gi}
    - name: tmp
      emptyDir: {}
{{- end }}
