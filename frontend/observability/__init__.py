"""Logs, metrics and traces of a frontend."""
