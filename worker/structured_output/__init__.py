"""Structured output: makes answers follow a grammar."""
