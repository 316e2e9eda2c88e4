"""Breaks a running server in every way that we know of, and counts what its clients were told."""
