"""Logs, metrics and traces of a frontend.

access_log          a log line for each finished request
recording           the record of requests that `sluice replay` reads
record_files        the files of this record, which are renamed when they are full
hooks               called when a request has ended: access log, record, metrics, tracing
metrics             Prometheus metrics
model_metrics       metrics of each model
picture_metrics     metrics of pictures
worker_sums         metrics of each model's workers, and of models that are loaded on demand
other_names         the same metrics under the names of other servers (--metrics-aliases)
histograms          histograms that are cheap to observe
stats               the document at /stats
tracing             OpenTelemetry spans
"""
