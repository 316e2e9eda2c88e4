"""Measurements of several processes that compute one model (worker/distributed). Each module is a command.

faults              kills and stops ranks while streams run: counts lost streams, and measures the longest pause
checks              the time to compare the ranks' checksums, in a step and at start
exchange            the time to exchange rows by shared memory, by TCP and by gloo
"""
