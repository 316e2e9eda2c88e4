"""Injects faults into a running server and counts what its clients received."""
