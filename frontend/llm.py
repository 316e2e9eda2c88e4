"""Public API: `from frontend.llm import LLM`. See frontend/offline/llm.py."""

from frontend.offline.llm import LLM

__all__ = ["LLM"]
