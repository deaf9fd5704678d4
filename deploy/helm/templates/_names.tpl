{{/* Objects of a release: <release>-<part>; a name is cut so that what Kubernetes appends still fits. */}}
{{- define "tandem.name" -}}
{{- $values := .root.Values -}}
{{- $own := list .root.Release.Name $values.nameOverride | compact | join "-" -}}
{{- $prefix := include "tandem.cut" (dict "text" ($values.fullnameOverride | default $own) "most" 28) -}}
{{- include "tandem.cut" (dict "text" (printf "%s-%s" $prefix .part) "most" 52) -}}
{{- end }}

{{/* What is cut says by a hash what it was: no two names become one. */}}
{{- define "tandem.cut" -}}
{{- if le (len .text) .most }}{{ .text }}
{{- else }}{{ .text | trunc (sub .most 9 | int) | trimSuffix "-" }}-{{ .text | sha256sum | trunc 8 }}
{{- end -}}
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
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The prefix of this release's keys in Redis, which may serve others too. */}}
{{- define "tandem.namespace" -}}
{{ .Release.Namespace }}.{{ .Release.Name }}
{{- end }}

{{- define "tandem.image" -}}
{{- $image := .root.Values.image -}}
{{- $suffix := .suffix | default "" -}}
{{- $tag := printf ":%s%s" ($image.tag | default .root.Chart.AppVersion) $suffix -}}
{{- with get $image.digests (print .name $suffix) }}{{ $tag = print "@" . }}{{ end -}}
{{- .image | default (print $image.repository "/" .name $tag) -}}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- .Values.serviceAccount.existing | default (include "tandem.name" (dict "root" . "part" "pods")) -}}
{{- end }}

{{- define "tandem.redisSecret" -}}
{{- .Values.redis.existingSecret | default (include "tandem.name" (dict "root" . "part" "redis")) -}}
{{- end }}

{{/* Whether this release runs its own Redis; else empty. */}}
{{- define "tandem.bundledRedis" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}true{{ end -}}
{{- end }}

{{- define "tandem.storeSecret" -}}
{{- .Values.store.existingSecret | default (include "tandem.name" (dict "root" . "part" "store")) -}}
{{- end }}

{{/* Whether this release runs its own store; else empty. */}}
{{- define "tandem.bundledStore" -}}
{{- if and .Values.store.enabled (not (or .Values.store.url .Values.store.existingSecret)) }}true{{ end -}}
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
