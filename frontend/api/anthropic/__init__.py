"""Anthropic's API format."""
