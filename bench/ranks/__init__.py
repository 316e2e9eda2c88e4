"""Measurements of several processes that compute one model (worker/distributed). Each module is a command."""
