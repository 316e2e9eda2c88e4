"""Anthropic's API format.

messages            reads requests, and writes responses that are plain text
messages_input      reads messages and their content blocks
messages_output     writes responses with reasoning and tool calls
envelope            the parts of a response around its content: events, usage, errors
    response_types      the JSON types of responses
"""
