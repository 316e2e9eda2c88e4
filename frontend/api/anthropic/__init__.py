"""Anthropic's API format.

messages            requests and plain text responses
messages_input      reads messages and their content blocks
messages_output     writes responses with reasoning and tool calls
envelope            what surrounds the content: events, usage, errors
    response_types      the types of the responses
"""
