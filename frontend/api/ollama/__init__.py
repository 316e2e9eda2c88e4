"""Ollama's API, for editors and apps that support no other: https://github.com/ollama/ollama/blob/main/docs/api.md

chat                /api/chat
generate            /api/generate
messages            chat messages, and the prompt made from them
options             the fields that /api/chat and /api/generate share, and the meaning of their options
envelope            model names, the first and last fields of an answer, errors
output              the lines of a stream, and whole responses
embed, embeddings   /api/embed and the older /api/embeddings
models              /api/tags, /api/show, /api/ps, /api/version
response_types      the JSON types of the responses

A stream is lines of JSON, one object each.
"""
