{{- define "dfe-archiver.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- end }}

{{- define "dfe-archiver.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dfe-archiver.labels" -}}
{{ include "dfe-archiver.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "dfe-archiver.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "dfe-archiver.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "dfe-archiver.grpc" -}}
{{- if eq (dig "transport" "kafka" .Values.config | toString | lower) "grpc" }}true{{ end }}
{{- end }}

{{/* Long enough for a rebalance's drain and the stop behind it, so that nothing is killed half-way. */}}
{{- define "dfe-archiver.gracePeriod" -}}
{{- $stop := dig "shutdown_timeout_secs" 20 .Values.config -}}
{{- $drain := dig "kafka" "drain_timeout_secs" 20 .Values.config -}}
{{- if or (contains "$" (toString $stop)) (contains "$" (toString $drain)) }}
{{- fail "config.shutdown_timeout_secs and config.kafka.drain_timeout_secs: write numbers, the pod's grace period is made of them" }}
{{- end }}
{{- add (ceil (float64 $stop)) (ceil (float64 $drain)) 10 -}}
{{- end }}

{{- define "dfe-archiver.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{/* A list, or one text with commas, as the archiver takes both. */}}
{{- define "dfe-archiver.commas" -}}
{{- if kindIs "string" . }}{{ . | nospace }}{{ else }}{{ join "," . }}{{ end }}
{{- end }}
