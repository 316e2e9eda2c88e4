"""Logs, metrics and traces of a frontend.

access_log          a log line for each finished request
recording           the record of requests that `sluice replay` reads
hooks               called when a request has ended: access log, record, metrics, tracing
metrics             Prometheus metrics
stats               the document at /stats
tracing             OpenTelemetry spans
"""
