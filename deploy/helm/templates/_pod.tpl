{{/* Security of a pod and of a container: Pod Security level "restricted". */}}
{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
{{- with .user }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if dig "block" "rdma" "resource" "" . }}
  add: [IPC_LOCK]
  {{- end }}
{{- end }}

{{/* An environment variable's text: lists, maps and numbers as JSON, which settings read. */}}
{{- define "tandem.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{- define "tandem.modelPath" -}}
{{- $weights := .model.weights -}}
{{- if eq $weights.kind "baked" }}/app/{{ $weights.path }}
{{- else if eq $weights.kind "download" }}/models/weights
{{- else }}{{ list "/models" $weights.path | join "/" | trimSuffix "/" }}{{ end -}}
{{- end }}

{{/* OpenTelemetry's variables, but for those that a workload has in its own `env`. */}}
{{- define "tandem.telemetry" -}}
{{- $told := .root.Values.telemetry -}}
{{- $own := list -}}
{{- range (default dict .block).env }}{{ $own = append $own .name }}{{ end -}}
{{- $all := $told.env -}}
{{- if $told.endpoint -}}
{{- $all = concat (list (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" $told.endpoint) (dict "name" "OTEL_EXPORTER_OTLP_PROTOCOL" "value" $told.protocol)) $all -}}
{{- end -}}
{{- range $all }}{{ if not (has .name $own) }}
{{ list . | toYaml }}
{{- end }}{{ end -}}
{{- end }}

{{/* What every process of the release is told. */}}
{{- define "tandem.sharedEnv" -}}
- name: TANDEM_REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ include "tandem.redisSecret" .root }}, key: url } }
- name: TANDEM_NAMESPACE
  value: {{ include "tandem.namespace" .root | quote }}
- name: TANDEM_CLUSTER_SECRET
  value: /etc/tandem/cluster/secret
{{- if .root.Values.cluster.tlsSecret }}
- name: TANDEM_TLS
  value: /etc/tandem/tls
{{- end }}
{{- include "tandem.telemetry" . }}
{{- end }}

{{- define "tandem.sharedVolumes" -}}
- name: tmp
  emptyDir: {}
- name: cluster
  secret:
    secretName: {{ include "tandem.clusterSecret" .root }}
    items: [{ key: secret, path: secret }]
{{- with .root.Values.cluster.tlsSecret }}
- name: tls
  secret: { secretName: {{ . }} }
{{- end }}
{{- with .root.Values.caBundle }}
{{- if .configMap }}
- name: ca
  configMap:
    name: {{ .configMap }}
    items: [{ key: {{ .key }}, path: ca.crt }]
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.sharedMounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: cluster, mountPath: /etc/tandem/cluster, readOnly: true }
{{- if .root.Values.cluster.tlsSecret }}
- { name: tls, mountPath: /etc/tandem/tls, readOnly: true }
{{- end }}
{{- if .root.Values.caBundle.configMap }}
- { name: ca, mountPath: /etc/tandem/ca, readOnly: true }
{{- end }}
{{- end }}

{{- define "tandem.env" -}}
{{- $worker := has .component (list "prefill" "decode") -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{ include "tandem.sharedEnv" . }}
- name: TANDEM_HOST
  value: {{ eq .root.Values.ipFamily "IPv6" | ternary "::" "0.0.0.0" | quote }}
{{- range .ports }}
- name: TANDEM_{{ eq .name "kv" | ternary "TRANSFER" (upper .name) }}_PORT
  value: {{ .port | toString | quote }}
{{- end }}
{{- if $worker }}
- name: TANDEM_MODEL_PATH
  value: {{ include "tandem.modelPath" . }}
- name: TANDEM_MODEL_NAME
  value: {{ .model.name | quote }}
{{- end }}
{{- if eq .component "gateway" }}
{{- with .model }}
- name: TANDEM_MODELS
  value: {{ list .name | toJson | quote }}
{{- end }}
{{- with include "tandem.aliases" .root }}
- name: TANDEM_ALIASES
  value: {{ . | quote }}
{{- end }}
{{- if .root.Values.store.enabled }}
- name: TANDEM_STORE_URL
  valueFrom: { secretKeyRef: { name: {{ include "tandem.storeSecret" .root }}, key: url } }
{{- end }}
- name: {{ .root.Values.apiKeys.required | ternary "TANDEM_API_KEYS" "TANDEM_INSECURE" }}
  value: {{ .root.Values.apiKeys.required | ternary "/etc/tandem/api-keys/keys.json" "true" | quote }}
{{- end }}
{{- if or $worker (eq .component "gateway") }}
- name: TANDEM_ADVERTISE_HOST
  value: $(POD_IP)
{{- end }}
{{- if $worker }}
- name: TANDEM_WORKER_ID
  value: $(POD_NAME)
{{- $labels := dict "zone" "topology.kubernetes.io/zone" "nvlink_domain" "nvidia.com/gpu.clique" }}
{{- /* Of the pod: labels that it has not are empty. */}}
{{- if not (hasKey .block.settings "node") }}
- name: TANDEM_NODE
  valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
{{- end }}
{{- range $name, $label := $labels }}
{{- if not (hasKey $.block.settings $name) }}
- name: TANDEM_{{ upper $name }}
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['{{ $label }}']" } }
{{- end }}
{{- end }}
{{- /* Where there are both roles, a new pod has to prove a link before an old one goes. */}}
- name: TANDEM_READY_WHEN
  value: {{ eq (include "tandem.roles" .) "decode prefill" | ternary "linked" "registered" }}
{{- end }}
{{- range $name, $value := .block.settings }}
- name: TANDEM_{{ upper $name }}
  value: {{ include "tandem.text" $value | quote }}
{{- end }}
{{- if .block.cacheClaim }}
- name: FLASHINFER_WORKSPACE_BASE
  value: /var/cache/tandem
- name: CUDA_CACHE_PATH
  value: /var/cache/tandem/cuda
{{- end }}
{{- range $name, $value := dig "rdma" "nccl" dict .block }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .block.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of a workload's container: with its RDMA devices, for whose memory IPC_LOCK is needed. */}}
{{- define "tandem.resources" -}}
{{- $resources := deepCopy .block.resources -}}
{{- if dig "rdma" "resource" "" .block -}}
{{- $resources = set $resources "limits" (set (default dict $resources.limits) .block.rdma.resource .block.rdma.count) -}}
{{- end -}}
{{- with .block.resourceClaims -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names (pick . "name") }}{{ end -}}
{{- $resources = set $resources "claims" $names -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{- define "tandem.probes" -}}
startupProbe:
  grpc: { port: 8081, service: live }
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .block.startupSeconds) 1) 2 }}
livenessProbe:
  grpc: { port: 8081, service: live }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: { port: 8081 }
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "tandem.volumes" -}}
{{ include "tandem.sharedVolumes" . }}
{{- if has .component (list "prefill" "decode") }}
- name: shm
  emptyDir: { medium: Memory, sizeLimit: {{ .block.sharedMemory | quote }} }
{{- with .block.cacheClaim }}
- name: cache
  persistentVolumeClaim: { claimName: {{ . }} }
{{- end }}
{{- end }}
{{- if and (eq .component "gateway") .root.Values.apiKeys.required }}
- name: api-keys
  secret:
    secretName: {{ include "tandem.keysSecret" .root }}
    items: [{ key: keys.json, path: keys.json }]
{{- end }}
{{- if include "tandem.hasWeights" . }}
{{- with .model }}
- name: models
  {{- if eq .weights.kind "claim" }}
  persistentVolumeClaim: { claimName: {{ .weights.claim }}, readOnly: true }
  {{- else if eq .weights.kind "hostPath" }}
  hostPath: { path: {{ .weights.hostPath | quote }}, type: Directory }
  {{- else if eq .weights.kind "image" }}
  image: { reference: {{ .weights.image | quote }}, pullPolicy: {{ $.root.Values.image.pullPolicy }} }
  {{- else }}
  emptyDir: { sizeLimit: {{ .weights.size | quote }} }
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.mounts" -}}
{{ include "tandem.sharedMounts" . }}
{{- if has .component (list "prefill" "decode") }}
- { name: shm, mountPath: /dev/shm }
{{- if .block.cacheClaim }}
- { name: cache, mountPath: /var/cache/tandem }
{{- end }}
{{- end }}
{{- if and (eq .component "gateway") .root.Values.apiKeys.required }}
- { name: api-keys, mountPath: /etc/tandem/api-keys, readOnly: true }
{{- end }}
{{- if include "tandem.hasWeights" . }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- end }}

{{/* Of workers whose model is not in their image. */}}
{{- define "tandem.hasWeights" -}}
{{- if has .component (list "prefill" "decode") }}{{ if ne .model.weights.kind "baked" }}true{{ end }}{{ end -}}
{{- end }}

{{/* Puts the model's files into the volume `models` and checks them. */}}
{{- define "tandem.loader" -}}
{{- $weights := .model.weights -}}
- name: weights
  image: {{ include "tandem.image" (dict "root" .root "name" "loader") }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - python
    - -m
    - tandem
    - fetch
    - {{ $weights.url | quote }}
    - /models/weights
  env:
    - name: TANDEM_FILES
      value: {{ toJson $weights.files | quote }}
  {{- with $weights.secret }}
  envFrom:
    - secretRef: { name: {{ . }} }
  {{- end }}
  resources:
    requests: { cpu: 500m, memory: 512Mi }
    limits: { memory: 2Gi }
  securityContext: {{- include "tandem.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - { name: models, mountPath: /models }
    - { name: tmp, mountPath: /tmp }
{{- end }}

{{/* Spread over nodes, and beside the pools of the other role. */}}
{{- define "tandem.placement" -}}
{{- with .block.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy .block.affinity -}}
{{- with .block.pairing }}
{{- if .topologyKey }}
{{- $labels := dict "app.kubernetes.io/instance" $.root.Release.Name "tandem/model" $.model.id -}}
{{- $roles := list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" (list "prefill" "decode")) -}}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" $labels "matchExpressions" $roles) -}}
{{- $kind := "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- if .required }}{{ $kind = "requiredDuringSchedulingIgnoredDuringExecution" }}{{ else }}{{ $term = dict "weight" 100 "podAffinityTerm" $term }}{{ end -}}
{{- $pod := default dict $affinity.podAffinity -}}
{{- $affinity = set $affinity "podAffinity" (set $pod $kind (append (default list (get $pod $kind)) $term)) -}}
{{- end }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.spread }}
topologySpreadConstraints:
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tandem.selector" $ | nindent 8 }}
{{- end }}
{{- range $name := list "priorityClassName" "runtimeClassName" "schedulerName" "resourceClaims" }}
{{- with get $.block $name }}
{{ dict $name . | toYaml }}
{{- end }}
{{- end }}
{{- end }}
