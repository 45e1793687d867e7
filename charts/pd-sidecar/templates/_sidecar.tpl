{{/*
The sidecar's container and what its pod needs for it. Another chart that depends on this one, with decode.enabled
and prefill.enabled off, puts it into a pod of its own:

  initContainers:
    - {{- include "pd-sidecar.container" (index .Subcharts "pd-sidecar") | nindent 6 }}
  volumes:
    {{- include "pd-sidecar.volumes" (index .Subcharts "pd-sidecar") | nindent 4 }}
  serviceAccountName: {{ include "pd-sidecar.service-account" (index .Subcharts "pd-sidecar") }}
*/}}

{{- define "pd-sidecar.args" -}}
- serve
- --config=/etc/pd-sidecar/sidecar.yaml
{{- range $name, $value := include "pd-sidecar.settings" . | fromYaml }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "pd-sidecar.spelled" .) | quote }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $name (include "pd-sidecar.spelled" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* POD_IP comes first: the others refer to it. */}}
{{- define "pd-sidecar.pod-address" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  value: $(POD_IP)
- name: VLLM_NIXL_SIDE_CHANNEL_PORT
  value: {{ .Values.sidecar.settings | dig "prefill-side-channel-port" 5600 | int | quote }}
{{- if eq (toString (get .Values.sidecar.settings "kv-connector")) "mooncake" }}
- name: VLLM_MOONCAKE_BOOTSTRAP_PORT
  value: {{ .Values.sidecar.settings | dig "mooncake-bootstrap-port" 8998 | int | quote }}
{{- end }}
{{- if include "pd-sidecar.uses-p2p" . }}
- name: VLLM_P2P_SIDE_CHANNEL_HOST
  value: $(POD_IP)
- name: VLLM_P2P_SIDE_CHANNEL_PORT
  value: {{ .Values.sidecar.settings | dig "p2p-connector-port" 7777 | int | quote }}
{{- end }}
{{- end }}

{{/* Not empty if engines have the offloading connector's P2P tier. */}}
{{- define "pd-sidecar.uses-p2p" -}}
{{- $settings := .Values.sidecar.settings }}
{{- $pulls := eq (include "pd-sidecar.spelled" (get $settings "enable-p2p-pull")) "on" }}
{{- $fetches := eq (include "pd-sidecar.spelled" (get $settings "prefill-from-decode")) "on" }}
{{- if or $pulls $fetches (eq (toString (get $settings "kv-connector")) "offloading") }}yes{{ end }}
{{- end }}

{{- define "pd-sidecar.container" -}}
{{- $settings := .Values.sidecar.settings }}
{{- $mode := include "pd-sidecar.mode" . }}
{{- $port := int (default 8000 (get $settings "port")) -}}
name: {{ .Values.sidecar.name }}
image: {{ include "pd-sidecar.image" (list .Values.sidecar.image .Chart.AppVersion "sidecar.image") }}
imagePullPolicy: {{ .Values.sidecar.image.pullPolicy }}
{{- if eq $mode "native" }}
restartPolicy: Always
{{- end }}
args:
  {{- include "pd-sidecar.args" . | nindent 2 }}
ports:
  {{- range $rank := until (int (default 1 (get $settings "data-parallel-size"))) }}
  - name: {{ if $rank }}http-{{ $rank }}{{ else }}http{{ end }}
    containerPort: {{ add $port $rank }}
  {{- end }}
  - name: sidecar-admin
    containerPort: {{ int (default 9090 (get $settings "metrics-port")) }}
env:
  {{- include "pd-sidecar.pod-address" . | nindent 2 }}
  - name: POD_NAMESPACE
    valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
  {{- if eq (include "pd-sidecar.spelled" (get $settings "tracing")) "on" }}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: OTEL_RESOURCE_ATTRIBUTES
    value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME)
  {{- end }}
  {{- with .Values.sidecar.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
startupProbe:
  httpGet: {path: /startupz, port: sidecar-admin}
  {{- toYaml .Values.sidecar.startupProbe | nindent 2 }}
readinessProbe:
  httpGet: {path: /readyz, port: sidecar-admin}
  {{- toYaml .Values.sidecar.readinessProbe | nindent 2 }}
livenessProbe:
  httpGet: {path: /livez, port: sidecar-admin}
  {{- toYaml .Values.sidecar.livenessProbe | nindent 2 }}
{{- if and (eq $mode "container") .Values.decode.preStopSeconds }}
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}
    sleep: {seconds: {{ int .Values.decode.preStopSeconds }}}
    {{- else }}
    exec: {command: [python3, -c, "import time; time.sleep({{ int .Values.decode.preStopSeconds }})"]}
    {{- end }}
{{- end }}
resources:
  {{- toYaml .Values.sidecar.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.sidecar.securityContext | nindent 2 }}
volumeMounts:
  - name: pd-sidecar-config
    mountPath: /etc/pd-sidecar
    readOnly: true
  {{- if .Values.sidecar.tls.secretName }}
  - name: pd-sidecar-tls
    mountPath: /etc/pd-sidecar-tls
    readOnly: true
  {{- end }}
  {{- if include "pd-sidecar.reads-api" . }}
  - name: pd-sidecar-token
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
  {{- end }}
  {{- with .Values.sidecar.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The folder is mounted, not the file: a file mounted by subPath would never change. */}}
{{- define "pd-sidecar.volumes" -}}
- name: pd-sidecar-config
  configMap: {name: {{ include "pd-sidecar.fullname" . }}-switch}
{{- with .Values.sidecar.tls.secretName }}
- name: pd-sidecar-tls
  secret: {secretName: {{ . }}}
{{- end }}
{{- if include "pd-sidecar.reads-api" . }}
- name: pd-sidecar-token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}
{{- end }}
