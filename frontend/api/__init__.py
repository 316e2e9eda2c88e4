"""The routes, and the API formats: how each one reads a request (`parse`) and writes its response.

    app                 the table of routes, and what runs as long as the app does
    app_state           what all routes share, and how they read a body
    api_formats         what an API format has to offer, and which one a path speaks
    generate            the routes that generate: parse the body, start the generation, write the response
    openai/             completions, typed events, chat completions, responses
    anthropic/          messages
    ollama/             chat, generate, embed, and the routes around them
    pooling/            the routes that answer with vectors or scores
    reports             the routes that report: health, statistics, metrics, models, the description of the API
    models, tokenize, prefix_cache      routes that need no generation

The formats share these modules:

    request_model       the base of all request types, and the refusals that name a field
    decoding            decodes a body into its type, or refuses it
    unknown_fields      refuses or ignores fields that no type knows, and tells
    request_types       the fields that the formats share, as types
    common              the model's facts, sampling, usage and timings
    context_length      whether a prompt fits, and the words if it does not
    chat_prompt         turns chat messages into a prompt
    call_history        messages as chat templates know them, in the form in which each template shows calls
    tools               tools and tool choices, as the formats write them
    fingerprint         what a frontend adds to a worker's fingerprint
    continuation        the field that lets an answer go on from a place in another one
    thinking_budget     the fields that limit reasoning
    structured_output   the fields that ask for structured output
    openapi, request_schema     the description of the API at /openapi.json
    response_types      the base of all response types
    keyword_struct      structs with keyword-only fields
"""
