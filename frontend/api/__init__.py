"""The routes, and the API formats: how each one reads a request (`parse`) and writes its response.

    app                 the routes: read the body, parse it, start the generation, write the response
    openai/             completions, typed events, chat completions, responses
    anthropic/          messages
    models, tokenize    routes that need no generation

The formats share these modules:

    fields              reads JSON by a table of fields; every refusal names its field
    common              sampling fields, the model's facts, usage and timings
    chat_prompt         chat messages as a prompt
    tools               tools and tool choices, as the formats write them
    structured_output   the fields that ask for structured output
    openapi, field_docs, response_schemas    the description of the API at /openapi.json
"""
