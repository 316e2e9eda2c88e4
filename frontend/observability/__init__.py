"""Logs, metrics and traces of a frontend.

access_log          a log line for each finished request
recording           the record of requests that `sluice replay` reads
record_files        its files, which are renamed when they are full
hooks               called when a request has ended: access log, record, metrics, tracing
metrics             Prometheus metrics
model_metrics       those of each model
picture_metrics     those of pictures
worker_sums         those of each model's workers, and of models that are loaded on demand
other_names         other servers' names of them, with --metrics-aliases
histograms          histograms that are cheap to observe
stats               the document at /stats
tracing             OpenTelemetry spans
"""
