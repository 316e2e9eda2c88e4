"""Benchmarks: `sluice bench`. Every report names its command. A bench that needs httpx or psutil, which `make run` does
not install, says so (packages.py); `make bench` installs both."""
