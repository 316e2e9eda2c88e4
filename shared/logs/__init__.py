"""Log lines, records of requests, and the page of metrics.

metrics_page        labels of all metrics, and which versions run
prometheus_adapter  the undocumented parts of prometheus-client that we use
record              the lines of a record of requests
line_writer         log lines that never block their writer
log_lines           log lines in JSON
"""
