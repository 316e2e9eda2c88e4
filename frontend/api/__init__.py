"""The routes, and the API formats: how each one reads a request (`parse`) and writes its response.

    app                 the routes: read the body, parse it, start the generation, write the response
    openai/             completions, typed events, chat completions, responses
    anthropic/          messages
    models, tokenize    routes that need no generation

The formats share these modules:

    request_model       the base of all request types, and the refusals that name a field
    decoding            decodes a body into its type, or refuses it
    request_types       the fields that the formats share, as types
    common              the model's facts, sampling, usage and timings
    chat_prompt         turns chat messages into a prompt
    tools               tools and tool choices, as the formats write them
    structured_output   the fields that ask for structured output
    openapi, request_schema     the description of the API at /openapi.json
    response_types      the base of all response types
    keyword_struct      structs with keyword-only fields
"""
