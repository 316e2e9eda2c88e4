"""Metrics and statistics of a worker.

metrics             Prometheus metrics
stats               rates and quantiles for Status messages
"""
