"""Public API of the installed distribution: `from sluice import LLM`."""

from frontend.offline.llm import LLM

__all__ = ["LLM"]
