"""Measurements of one part each. Most modules are commands: `python -m bench.micro.NAME`."""
