"""What a frontend reports about itself.

access_log          a log line for each finished request
hooks               what is called when a request has ended: access log, metrics, tracing
metrics             Prometheus metrics
stats               the document at /stats
tracing             OpenTelemetry spans
"""
