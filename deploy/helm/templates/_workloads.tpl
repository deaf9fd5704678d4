{{/*
Every workload of the release, all of one shape, as JSON: {items: [...]}

  part        the end of its objects' names        component  gateway | prefill | decode | kvstore
  block       its values, defaults merged in       model      the entry of `models` that a pool serves, or a gateway alone
  ports       name and number of what it listens on

Each file of templates/ makes one kind of object of each of them.
*/}}
{{- define "tandem.workloads" -}}
{{- $items := list -}}
{{- $models := dict -}}
{{- range .Values.models -}}
  {{- if hasKey $models .id }}{{ fail (printf "models: two have the id %q" .id) }}{{ end -}}
  {{- $_ := set $models .id . -}}
{{- end -}}
{{- $ports := list (dict "name" "http" "port" 8000) (dict "name" "grpc" "port" 50051) (dict "name" "health" "port" 8081) -}}
{{- range (include "tandem.gateways" . | fromJson).items -}}
  {{- $items = append $items (merge (pick . "part" "model") (dict "component" "gateway" "block" $.Values.gateway "ports" $ports)) -}}
{{- end -}}
{{- $parts := dict "gateway" true "kvstore" true "redis" true "store" true "doctor" true -}}
{{- range .Values.pools -}}
  {{- if or (hasKey $parts .name) (hasPrefix "gateway-" .name) }}{{ fail (printf "pools: the name %q is taken" .name) }}{{ end -}}
  {{- $_ := set $parts .name true -}}
  {{- if not (hasKey $models .model) }}{{ fail (printf "pools: %s: model %q is the id of none of `models`" .name .model) }}{{ end -}}
  {{- $block := mergeOverwrite (deepCopy $.Values.workers) (deepCopy .) -}}
  {{- $ports := list (dict "name" "grpc" "port" 50061) (dict "name" "health" "port" 8081) (dict "name" "metrics" "port" 9090) (dict "name" "kv" "port" 50062) -}}
  {{- $items = append $items (dict "part" .name "component" .role "block" $block "model" (get $models .model) "ports" $ports) -}}
{{- end -}}
{{- $ports := list (dict "name" "grpc" "port" 50052) (dict "name" "health" "port" 8081) (dict "name" "metrics" "port" 9090) -}}
{{- $items = append $items (dict "part" "kvstore" "component" "kvstore" "block" .Values.kvstore "ports" $ports) -}}
{{- dict "items" $items | toJson -}}
{{- end }}

{{/*
Its gateways, as JSON: {items: [...]}: one for all models, or one for each.

  part        the end of its objects' names        model      the one that it serves, if it is one
  models      all that it serves                   hostnames  at which it is reached from outside
*/}}
{{- define "tandem.gateways" -}}
{{- $items := list -}}
{{- if .Values.gateway.perModel -}}
  {{- range .Values.models -}}
    {{- if .aliases }}{{ fail (printf "models: %s: aliases need one gateway for all models, and gateway.perModel is true" .id) }}{{ end -}}
    {{- $items = append $items (dict "part" (printf "gateway-%s" .id) "model" . "models" (list .) "hostnames" (.hostnames | default list)) -}}
  {{- end -}}
{{- else -}}
  {{- $hosts := list -}}
  {{- range .Values.models }}{{ $hosts = concat $hosts (.hostnames | default list) }}{{ end -}}
  {{- $items = append $items (dict "part" "gateway" "models" .Values.models "hostnames" ($hosts | uniq)) -}}
{{- end -}}
{{- dict "items" $items | toJson -}}
{{- end }}

{{/* Of each alias what its models say of it, as JSON; empty where there is none. */}}
{{- define "tandem.aliases" -}}
{{- $aliases := dict -}}
{{- range $model := .Values.models -}}
  {{- range $alias, $weight := .aliases -}}
    {{- $_ := set $aliases $alias (set (get $aliases $alias | default dict) $model.name $weight) -}}
  {{- end -}}
{{- end -}}
{{- with $aliases }}{{ toJson . }}{{ end -}}
{{- end }}

{{/* Roles that a model's pools have, such as "prefill decode". */}}
{{- define "tandem.roles" -}}
{{- $roles := list -}}
{{- range .root.Values.pools }}{{ if eq .model $.model.id }}{{ $roles = append $roles .role }}{{ end }}{{ end -}}
{{- $roles | uniq | sortAlpha | join " " -}}
{{- end }}
