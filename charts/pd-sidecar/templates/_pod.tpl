{{/* The pods of both roles: (dict "root" $ "role" "decode" or "prefill"). */}}

{{/* Seconds of drain that a role's sidecar may take: prefill pods have none. */}}
{{- define "pd-sidecar.drain" -}}
{{- if eq .role "decode" }}{{ ceil (.root.Values.sidecar.settings | dig "drain-timeout" 60 | float64) }}{{ else }}0{{ end }}
{{- end }}

{{/* One after the other in the worst case: the gateway's knowledge, the engine's open requests, the sidecar's slow
readers; and 15 s for processes to end. Less would cut streams with SIGKILL. */}}
{{- define "pd-sidecar.grace" -}}
{{- $values := index .root.Values .role }}
{{- $needed := add (int $values.preStopSeconds) (int $values.shutdownTimeoutSeconds) (int (include "pd-sidecar.drain" .)) 15 }}
{{- $given := $values.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $given }}{{ $needed }}
{{- else if lt (int $given) (int $needed) }}
{{- fail (printf "%s.terminationGracePeriodSeconds %d cuts streams: preStop, shutdown and drain need %d (leave it null)" .role (int $given) $needed) }}
{{- else }}{{ int $given }}{{ end }}
{{- end }}

{{/* vLLM's connector for the sidecar's. Both sides of a store read and write; with NIXL each has its part. */}}
{{- define "pd-sidecar.kv-transfer-config" -}}
{{- $ours := toString (default "nixlv2" (get .root.Values.sidecar.settings "kv-connector")) }}
{{- $known := dict "nixlv2" "NixlConnector" "nixl-push" "NixlPushConnector" "lmcache" "LMCacheConnectorV1" "offloading" "OffloadingConnector" "mooncake" "MooncakeConnector" }}
{{- $theirs := default (get $known $ours) .root.Values.engine.kvConnector }}
{{- if not $theirs }}
{{- fail (printf "engine.kvConnector is needed: vLLM's connector for sidecar.settings.kv-connector %s" $ours) }}
{{- end }}
{{- $role := ternary (ternary "kv_consumer" "kv_producer" (eq .role "decode")) "kv_both" (or (hasPrefix "nixl" $ours) (eq $ours "mooncake")) }}
{{- $extra := .root.Values.engine.kvTransferExtra }}
{{- if eq $ours "offloading" }}
{{- if not (get $extra "cpu_bytes_to_use") }}
{{- fail "engine.kvTransferExtra.cpu_bytes_to_use is needed: memory of the tier that offloading keeps blocks in" }}
{{- end }}
{{- $extra = mergeOverwrite (dict "spec_name" "TieringOffloadingSpec" "secondary_tiers" (list (dict "type" "p2p"))) $extra }}
{{- else }}
{{- with get .root.Values.sidecar.settings "kv-lease" }}
{{- $extra = mergeOverwrite (dict "kv_lease_duration" .) $extra }}
{{- end }}
{{- end }}
{{- $config := dict "kv_connector" $theirs "kv_role" (default $role (index .root.Values .role).kvRole) }}
{{- if $extra }}{{ $_ := set $config "kv_connector_extra_config" $extra }}{{ end }}
{{- toJson $config }}
{{- end }}

{{/* What the decode engine has to say for --kv-events: it connects to the sidecar's loopback port, rank r to port + r,
and nothing is exposed. */}}
{{- define "pd-sidecar.kv-events-config" -}}
{{- $settings := .Values.sidecar.settings }}
{{- $config := dict "enable_kv_cache_events" true "publisher" "zmq" }}
{{- $_ := set $config "endpoint" (printf "tcp://127.0.0.1:%d" ($settings | dig "kv-events-port" 5557 | int)) }}
{{- with $settings | dig "kv-events-replay-port" 0 | int }}
{{- $_ := set $config "replay_endpoint" (printf "tcp://127.0.0.1:%d" .) }}
{{- end }}
{{- toJson $config }}
{{- end }}

{{- define "pd-sidecar.engine" -}}
{{- $root := .root }}{{ $values := index .root.Values .role }}{{ $engine := .root.Values.engine }}
{{- $settings := .root.Values.sidecar.settings }}
{{- $isDecode := eq .role "decode" }}
{{- $port := int (ternary (default 8200 (get $settings "model-server-port")) .root.Values.prefill.port $isDecode) }}
{{- $ranks := int (ternary (default 1 (get $settings "data-parallel-size")) .root.Values.prefill.dataParallelSize $isDecode) }}
{{- $ports := ternary $ranks (int (include "pd-sidecar.prefill-ports" .root)) $isDecode }}
{{- $idle := $settings | dig "engine-idle-timeout" 4 | float64 }}
{{- if le (float64 $engine.keepAliveSeconds) $idle }}
{{- fail (printf "engine.keepAliveSeconds %v must be longer than sidecar.settings.engine-idle-timeout %v, or reused connections break" $engine.keepAliveSeconds $idle) }}
{{- end -}}
name: vllm
image: {{ include "pd-sidecar.image" (list $engine.image "" "engine.image") }}
imagePullPolicy: {{ $engine.image.pullPolicy }}
command: {{- toYaml $engine.command | nindent 2 }}
args:
  - {{ required "model.name is needed: what vLLM loads" $root.Values.model.name | quote }}
  - --port={{ $port }}
  {{- with $root.Values.model.servedName }}
  - {{ printf "--served-model-name=%s" . | quote }}
  {{- end }}
  {{- if gt $ranks 1 }}
  - --data-parallel-size={{ $ranks }}
  {{- if gt $ports 1 }}
  - --data-parallel-size-local={{ $ranks }}
  - --data-parallel-multi-port-external-lb
  {{- end }}
  {{- end }}
  {{- if eq $values.kind "LeaderWorkerSet" }}
  {{- include "pd-sidecar.node-args" . | nindent 2 }}
  {{- end }}
  - --shutdown-timeout={{ int $values.shutdownTimeoutSeconds }}
  {{- if ne (toString (get $settings "kv-connector")) "none" }}
  - {{ printf "--kv-transfer-config=%s" (include "pd-sidecar.kv-transfer-config" .) | quote }}
  {{- end }}
  {{- if and $isDecode (eq (include "pd-sidecar.spelled" (get $settings "kv-events")) "on") }}
  - {{ printf "--kv-events-config=%s" (include "pd-sidecar.kv-events-config" $root) | quote }}
  {{- end }}
  {{- range concat $engine.args $values.args }}
  - {{ toString . | quote }}
  {{- end }}
ports:
  {{- range $rank := until $ports }}
  - name: {{ if $rank }}engine-{{ $rank }}{{ else }}engine{{ end }}
    containerPort: {{ add $port $rank }}
  {{- end }}
  {{- range $rank := until $ranks }}
  - name: nixl-{{ $rank }}
    containerPort: {{ add (int (default 5600 (get $settings "prefill-side-channel-port"))) $rank }}
  {{- end }}
env:
  {{- include "pd-sidecar.pod-address" $root | nindent 2 }}
  - name: VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    value: {{ include "pd-sidecar.spelled" $engine.keepAliveSeconds | quote }}
  - name: PYTHONHASHSEED
    value: {{ $engine.hashSeed | quote }}
  {{- if $root.Values.networkPolicy.enabled }}
  - name: UCX_TCP_PORT_RANGE
    value: {{ with $root.Values.networkPolicy.nixlDataPorts }}{{ printf "%d-%d" (int .first) (int .last) | quote }}{{ end }}
  {{- end }}
  {{- range $name, $value := $engine.ucx }}
  - name: {{ $name }}
    value: {{ include "pd-sidecar.spelled" $value | quote }}
  {{- end }}
  {{- with concat $engine.env $values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $health := dict "path" "/health" "port" "engine" }}
{{- if include "pd-sidecar.engine-tls" (list $root .role) }}{{ $_ := set $health "scheme" "HTTPS" }}{{ end }}
startupProbe:
  httpGet: {{- toYaml $health | nindent 4 }}
  {{- toYaml $engine.startupProbe | nindent 2 }}
readinessProbe:
  httpGet: {{- toYaml $health | nindent 4 }}
  {{- toYaml $engine.readinessProbe | nindent 2 }}
livenessProbe:
  httpGet: {{- toYaml $health | nindent 4 }}
  {{- toYaml $engine.livenessProbe | nindent 2 }}
{{- /* As a plain container the sidecar is stopped together with the engine: the engine has to outlast its drain. */}}
{{- $preStop := int $values.preStopSeconds }}
{{- if and $isDecode (eq (include "pd-sidecar.mode" $root) "container") }}
{{- $preStop = add $preStop (int (include "pd-sidecar.drain" .)) }}
{{- end }}
{{- if $preStop }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30.0-0" $root.Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ $preStop }}}
    {{- else }}
    exec: {command: [sleep, {{ $preStop | quote }}]}
    {{- end }}
{{- end }}
resources:
  {{- $resources := deepCopy $values.resources }}
  {{- if $engine.rdma }}
  {{- $resources = mergeOverwrite (dict "limits" (deepCopy $engine.rdma) "requests" (deepCopy $engine.rdma)) $resources }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
{{- $security := deepCopy $engine.securityContext }}
{{- if $engine.rdma }}
{{- $security = mergeOverwrite (dict "capabilities" (dict "add" (list "IPC_LOCK"))) $security }}
{{- end }}
{{- with $security }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or $engine.shm.enabled $values.volumeMounts }}
volumeMounts:
  {{- if $engine.shm.enabled }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- with $values.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "pd-sidecar.pod-spec" -}}
{{- $root := .root }}{{ $values := index .root.Values .role }}
{{- $isDecode := eq .role "decode" }}
{{- $native := and $isDecode (eq (include "pd-sidecar.mode" $root) "native") -}}
terminationGracePeriodSeconds: {{ include "pd-sidecar.grace" . }}
enableServiceLinks: false
automountServiceAccountToken: false
{{- if $isDecode }}
serviceAccountName: {{ include "pd-sidecar.service-account" $root }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpread.enabled }}
topologySpreadConstraints:
  - maxSkew: {{ int $values.topologySpread.maxSkew }}
    topologyKey: {{ $values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- include "pd-sidecar.selector" (list $root .role) | nindent 8 }}
{{- end }}
{{- if or $native $values.initContainers }}
initContainers:
  {{- with $values.initContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $native }}
  - {{- include "pd-sidecar.container" $root | nindent 4 }}
  {{- end }}
{{- end }}
containers:
  - {{- include "pd-sidecar.engine" . | nindent 4 }}
  {{- if and $isDecode (not $native) }}
  - {{- include "pd-sidecar.container" $root | nindent 4 }}
  {{- end }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or $isDecode $root.Values.engine.shm.enabled $values.volumes }}
volumes:
  {{- if $isDecode }}
  {{- include "pd-sidecar.volumes" $root | nindent 2 }}
  {{- end }}
  {{- if $root.Values.engine.shm.enabled }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.engine.shm.sizeLimit }}}
  {{- end }}
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "pd-sidecar.pod-template" -}}
{{- $root := .root }}{{ $values := index .root.Values .role -}}
metadata:
  labels:
    {{- $labels := merge (dict) $values.podLabels (include "pd-sidecar.selector" (list $root .role) | fromYaml) (include "pd-sidecar.llm-d-labels" (list $root .role) | fromYaml) (include "pd-sidecar.labels" $root | fromYaml) (dict "app.kubernetes.io/component" .role) }}
    {{- toYaml (omit $labels "helm.sh/chart" "app.kubernetes.io/version" "app.kubernetes.io/managed-by") | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $spec := include "pd-sidecar.pod-spec" . | fromYaml }}
  {{- with get $spec "Error" }}{{ fail . }}{{ end }}
  {{- toYaml (mergeOverwrite $spec (deepCopy $values.podSpec)) | nindent 2 }}
{{- end }}

{{- define "pd-sidecar.deployment" -}}
{{- $root := .root }}{{ $values := index .root.Values .role -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "pd-sidecar.fullname" $root }}-{{ .role }}
  labels:
    {{- include "pd-sidecar.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    {{- include "pd-sidecar.llm-d-labels" (list $root .role) | nindent 4 }}
spec:
  {{- if not (kindIs "invalid" $values.replicas) }}
  replicas: {{ int $values.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "pd-sidecar.selector" (list $root .role) | nindent 6 }}
  {{- with $values.strategy }}
  strategy: {{- toYaml . | nindent 4 }}
  {{- end }}
  template: {{- include "pd-sidecar.pod-template" . | nindent 4 }}
{{- end }}
