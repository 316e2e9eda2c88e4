"""Public API: `from frontend.llm import LLM`; frontend/offline/llm.py implements it."""

from frontend.offline.llm import LLM

__all__ = ["LLM"]
