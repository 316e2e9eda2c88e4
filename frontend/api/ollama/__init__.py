"""Ollama's API, for editors and apps that support no other: https://github.com/ollama/ollama/blob/main/docs/api.md."""
