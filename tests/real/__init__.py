"""Checks how a server behaves with a real model, SmolLM2-135M-Instruct in Q4_1 (`python -m tests.real`)."""
