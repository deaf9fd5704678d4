{{/* Objects of a release: <release>-<part>; a name is cut so that what Kubernetes appends still fits. */}}
{{- define "tandem.name" -}}
{{- printf "%s-%s" (.root.Release.Name | trunc 28 | trimSuffix "-") .part | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{/* What pods of one workload are selected by; never changes. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
tandem/part: {{ .part }}
{{- end }}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The prefix of this release's keys in Redis, which may serve others too. */}}
{{- define "tandem.namespace" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}

{{- define "tandem.image" -}}
{{- $image := .root.Values.image -}}
{{- .image | default (printf "%s/%s:%s" $image.repository .name (printf "%s%s" ($image.tag | default .root.Chart.AppVersion) (.suffix | default ""))) -}}
{{- end }}

{{- define "tandem.redisSecret" -}}
{{- .Values.redis.existingSecret | default (include "tandem.name" (dict "root" . "part" "redis")) -}}
{{- end }}

{{/* Whether this release runs its own Redis; else empty. */}}
{{- define "tandem.bundledRedis" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}true{{ end -}}
{{- end }}

{{- define "tandem.keysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (include "tandem.name" (dict "root" . "part" "api-keys")) -}}
{{- end }}

{{/* A Secret's value that was there before, or nothing; a rendering without a cluster sees none. */}}
{{- define "tandem.kept" -}}
{{- dig "data" .key "" (lookup "v1" "Secret" .root.Release.Namespace .name) | b64dec -}}
{{- end }}

{{- define "tandem.clusterSecret" -}}
{{- .Values.cluster.existingSecret | default (include "tandem.name" (dict "root" . "part" "cluster")) -}}
{{- end }}
