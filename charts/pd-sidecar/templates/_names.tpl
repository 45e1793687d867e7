{{/* Names, labels and values of the sidecar's settings. Knows nothing of pods. */}}

{{- define "pd-sidecar.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 53 characters, so that every suffix of ours still fits into a name. */}}
{{- define "pd-sidecar.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- $name := include "pd-sidecar.name" . }}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{- define "pd-sidecar.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "pd-sidecar.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (list root role): what selects the pods of a role. Immutable in a Deployment: labels of llm-d stay out of it. */}}
{{- define "pd-sidecar.selector" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}
{{- with (index $root.Values $role).selectorLabels }}
{{- toYaml . }}
{{- else -}}
app.kubernetes.io/name: {{ include "pd-sidecar.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ $role }}
{{- end }}
{{- end }}

{{/* (list root role): llm-d's labels, on which EPPs and InferencePools select. */}}
{{- define "pd-sidecar.llm-d-labels" -}}
{{- $root := index . 0 }}{{ $role := index . 1 -}}
llm-d.ai/inference-serving: "true"
llm-d.ai/role: {{ $role }}
llm-d.ai/engine-type: {{ $root.Values.engineType | quote }}
{{- with include "pd-sidecar.model-label" $root }}
llm-d.ai/model: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "pd-sidecar.model-label" -}}
{{- regexReplaceAll "[^A-Za-z0-9._-]+" (default .Values.model.name .Values.model.label) "-" | trunc 63 | trimAll "-._" }}
{{- end }}

{{- define "pd-sidecar.image" -}}
{{- $image := index . 0 }}{{ $default := index . 1 }}{{ $where := index . 2 }}
{{- $repository := required (printf "%s.repository is needed: the registry and name of the image" $where) $image.repository }}
{{- if $image.digest }}{{ printf "%s@%s" $repository $image.digest }}
{{- else }}{{ printf "%s:%s" $repository (toString (default $default $image.tag)) }}{{ end }}
{{- end }}

{{/* A value as the command line spells it. YAML reads on and off as truth values and large integers as floats. */}}
{{- define "pd-sidecar.spelled" -}}
{{- if kindIs "bool" . }}{{ ternary "on" "off" . }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}
{{- else }}{{ . }}{{ end }}
{{- end }}

{{- define "pd-sidecar.disagg" -}}
{{- include "pd-sidecar.spelled" .Values.disagg }}
{{- end }}

{{/* Which kind of container the sidecar is: native or container. */}}
{{- define "pd-sidecar.mode" -}}
{{- $knows := semverCompare ">=1.29.0-0" .Capabilities.KubeVersion.Version }}
{{- if eq .Values.sidecar.mode "auto" }}{{ ternary "native" "container" $knows }}
{{- else if and (eq .Values.sidecar.mode "native") (not $knows) }}
{{- fail (printf "sidecar.mode native needs Kubernetes 1.29, this is %s: set sidecar.mode=container" .Capabilities.KubeVersion.Version) }}
{{- else }}{{ .Values.sidecar.mode }}{{ end }}
{{- end }}

{{/* "yes" if the sidecar asks the Kubernetes API for its prefill pods. */}}
{{- define "pd-sidecar.reads-api" -}}
{{- if eq (toString (default "none" (get .Values.sidecar.settings "discovery"))) "kubernetes" }}yes{{ end }}
{{- end }}

{{/* The sidecar's settings, with those that sidecar.tls stands for, and, where nobody has said it, with the model's
prefill pods (of llm-d's role, which is serve's own default) at the port of this chart's. Whether this chart installs
any must not change them: adding prefill pods would restart the decode pods. */}}
{{- define "pd-sidecar.settings" -}}
{{- $settings := deepCopy .Values.sidecar.settings }}
{{- if include "pd-sidecar.reads-api" . }}
{{- if contains "/" (toString (default "" (get $settings "inference-pool"))) }}
{{- fail "sidecar.settings.inference-pool is the pool's name: its namespace is sidecar.settings.discovery-namespace, where the Role is made" }}
{{- end }}
{{- $found := dict "discovery-port" (int .Values.prefill.port) }}
{{- with include "pd-sidecar.model-label" . }}{{ $_ := set $found "discovery-model" . }}{{ end }}
{{- $settings = merge $settings $found }}
{{- end }}
{{- if .Values.sidecar.tls.secretName }}
{{- $settings = mergeOverwrite $settings (dict "secure-serving" "on" "cert-path" "/etc/pd-sidecar-tls") }}
{{- if .Values.sidecar.tls.clientCa }}{{ $_ := set $settings "client-ca" "/etc/pd-sidecar-tls/ca.crt" }}{{ end }}
{{- else if .Values.sidecar.tls.clientCa }}
{{- fail "sidecar.tls.clientCa is in the secret too: sidecar.tls.secretName is needed" }}
{{- end }}
{{- if and .Values.decode.enabled (eq .Values.decode.kind "LeaderWorkerSet") }}
{{- if eq (include "pd-sidecar.spelled" (get $settings "nixl-relay")) "on" }}
{{- fail "sidecar.settings.nixl-relay on with decode.kind LeaderWorkerSet: the relay is on the leader's loopback, where workers of other pods cannot ask it" }}
{{- end }}
{{- $_ := set $settings "nixl-relay" "off" }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* http or https, as clients have to say. */}}
{{- define "pd-sidecar.scheme" -}}
{{- $settings := include "pd-sidecar.settings" . | fromYaml }}
{{- eq (include "pd-sidecar.spelled" (get $settings "secure-serving")) "on" | ternary "https" "http" }}
{{- end }}

{{/* (list root role): "yes" if the sidecar speaks TLS to the engines of that role. */}}
{{- define "pd-sidecar.engine-tls" -}}
{{- $named := get (index . 0).Values.sidecar.settings "enable-tls" | default list }}
{{- if has (ternary "decoder" "prefiller" (eq (index . 1) "decode")) $named }}yes{{ end }}
{{- end }}

{{/* HTTP ports of a prefill pod: one for each rank, or one for all. */}}
{{- define "pd-sidecar.prefill-ports" -}}
{{- if .Values.prefill.portPerRank }}
{{- $others := get .Values.sidecar.settings "inference-pool" }}
{{- if and (gt (int .Values.prefill.dataParallelSize) 1) (include "pd-sidecar.reads-api" .) (not $others) }}
{{- fail "prefill.portPerRank with discovery kubernetes would leave all ranks but the first idle: set it to false, or name an inference-pool that has their targetPorts" }}
{{- end }}
{{- int .Values.prefill.dataParallelSize }}
{{- else }}1{{ end }}
{{- end }}

{{- define "pd-sidecar.service-account" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "pd-sidecar.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}
