"""The public module of `LLM`: `from frontend.llm import LLM`. frontend/offline/llm.py implements the class."""

from frontend.offline.llm import LLM

__all__ = ["LLM"]
