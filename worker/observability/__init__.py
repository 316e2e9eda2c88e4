"""Metrics and statistics of a worker.

metrics             Prometheus metrics
draft_metrics       metrics of draft tokens by position
stats               rates and quantiles for Status messages
"""
