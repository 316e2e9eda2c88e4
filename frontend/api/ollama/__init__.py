"""Ollama's API, for editors and apps that speak no other: https://github.com/ollama/ollama/blob/main/docs/api.md

chat                /api/chat
generate            /api/generate
messages            chat messages, and the prompt that they make
options             the fields that both share, and what their options mean
envelope            model names, the head and the end of an answer, errors
output              the lines of a stream, and whole answers
embed, embeddings   /api/embed and the older /api/embeddings
models              /api/tags, /api/show, /api/ps, /api/version
response_types      the types of the responses

A stream is lines of JSON, one object each.
"""
