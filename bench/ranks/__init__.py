"""Measurements of several processes that compute one model (worker/ranks). Each module is a command.

faults              kills and stops ranks under streams: none may be lost, and what is the longest pause
checks              what it costs to compare ranks, in a step and at start
exchange            what an exchange of rows costs by memory, by TCP and by gloo
"""
