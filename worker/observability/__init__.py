"""What a worker reports about itself.

metrics             Prometheus metrics
stats               rates and quantiles for Status messages
"""
