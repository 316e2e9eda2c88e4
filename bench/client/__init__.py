"""A load client.

load_client         sends requests at given times and records what arrives
http_response       reads HTTP/1.1 responses from bytes
workloads           the workloads, as data
server              starts the server to measure
summary             computes throughput and latency figures from records
"""
