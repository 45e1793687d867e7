{{/*
An engine over several pods (kind LeaderWorkerSet): (dict "root" $ "role" "decode" or "prefill"). The leader has the HTTP
port, the side channel and, for decode, the sidecar; its workers hold their part of the model and of the KV. Only the
leader has the labels on which anybody selects.
*/}}

{{/* Selects leaders and workers. */}}
{{- define "pd-sidecar.all-pods" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "pd-sidecar.name" .root }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [{{ .role }}, {{ .role }}-worker]}
{{- end }}

{{/* How the leader's engine finds its workers. */}}
{{- define "pd-sidecar.node-args" -}}
- --nnodes={{ int (index .root.Values .role).leaderWorkerSet.size }}
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- end }}

{{/* What a worker gets: the engine without a port, and no probe, since it answers nobody. The group's pods are told to
stop together: a worker's preStop lasts until its leader has finished what it had begun. */}}
{{- define "pd-sidecar.worker-template" -}}
{{- $root := .root }}{{ $values := index .root.Values .role }}
{{- $lasts := add (int $values.preStopSeconds) (int $values.shutdownTimeoutSeconds) }}
{{- $engine := include "pd-sidecar.engine" . | fromYaml }}
{{- with get $engine "Error" }}{{ fail . }}{{ end }}
{{- $args := append (get $engine "args") "--headless" }}
{{- $sleep := dict "exec" (dict "command" (list "sleep" (toString $lasts))) }}
{{- if semverCompare ">=1.30.0-0" $root.Capabilities.KubeVersion.Version }}
{{- $sleep = dict "sleep" (dict "seconds" $lasts) }}
{{- end }}
{{- $engine = mergeOverwrite (omit $engine "ports" "startupProbe" "readinessProbe" "livenessProbe") (dict "args" $args "lifecycle" (dict "preStop" $sleep)) -}}
metadata:
  labels:
    app.kubernetes.io/name: {{ include "pd-sidecar.name" $root }}
    app.kubernetes.io/instance: {{ $root.Release.Name }}
    app.kubernetes.io/component: {{ .role }}-worker
    {{- with $root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $spec := dict "terminationGracePeriodSeconds" (add $lasts 15) "enableServiceLinks" false "automountServiceAccountToken" false }}
  {{- $_ := set $spec "containers" (list $engine) }}
  {{- with $values.initContainers }}{{ $_ := set $spec "initContainers" . }}{{ end }}
  {{- with $root.Values.imagePullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end }}
  {{- $volumes := $values.volumes }}
  {{- with $root.Values.engine.shm }}
  {{- if .enabled }}
  {{- $volumes = prepend $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .sizeLimit)) }}
  {{- end }}
  {{- end }}
  {{- with $volumes }}{{ $_ := set $spec "volumes" . }}{{ end }}
  {{- toYaml (mergeOverwrite $spec (deepCopy $values.podSpec)) | nindent 2 }}
{{- end }}

{{- define "pd-sidecar.leader-worker-set" -}}
{{- $root := .root }}{{ $values := index .root.Values .role }}{{ $set := (index .root.Values .role).leaderWorkerSet }}
{{- $ranks := ternary (default 1 (get $root.Values.sidecar.settings "data-parallel-size")) $root.Values.prefill.dataParallelSize (eq .role "decode") }}
{{- if gt (int $ranks) 1 }}
{{- fail (printf "%s.kind LeaderWorkerSet is one engine over several pods: data-parallel ranks on pods of their own are Deployments" .role) }}
{{- end }}
{{- if $values.strategy }}
{{- fail (printf "%s.strategy is a Deployment's: with kind LeaderWorkerSet it is %s.leaderWorkerSet.rollingUpdate" .role .role) }}
{{- end -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "pd-sidecar.fullname" $root }}-{{ .role }}
  labels:
    {{- include "pd-sidecar.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- include "pd-sidecar.llm-d-labels" (list $root .role) | nindent 4 }}
  {{- if or $set.exclusiveTopology $set.subGroupExclusiveTopology }}
  annotations:
    {{- with $set.exclusiveTopology }}
    leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . }}
    {{- end }}
    {{- with $set.subGroupExclusiveTopology }}
    leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology: {{ . }}
    {{- end }}
  {{- end }}
spec:
  {{- if not (kindIs "invalid" $values.replicas) }}
  replicas: {{ int $values.replicas }}
  {{- end }}
  # The leader is ready once its workers are: they must not wait for that.
  startupPolicy: LeaderCreated
  {{- with $set.rollingUpdate }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {{- toYaml . | nindent 6 }}
  {{- end }}
  leaderWorkerTemplate:
    size: {{ int $set.size }}
    restartPolicy: {{ $set.restartPolicy }}
    {{- with $set.subGroupSize }}
    subGroupPolicy: {subGroupSize: {{ int . }}}
    {{- end }}
    leaderTemplate: {{- include "pd-sidecar.pod-template" . | nindent 6 }}
    workerTemplate: {{- include "pd-sidecar.worker-template" . | nindent 6 }}
{{- end }}
