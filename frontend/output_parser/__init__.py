"""Reasoning and tool calls in generated text: how a model writes them, and how they are parsed."""
