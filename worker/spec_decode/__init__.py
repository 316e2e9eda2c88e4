"""Drafters that run a model: they propose tokens for all sequences of a step at once."""
