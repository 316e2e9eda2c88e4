"""Metrics and statistics of a worker.

metrics             Prometheus metrics
draft_metrics       those of draft tokens by their position
stats               rates and quantiles for Status messages
"""
