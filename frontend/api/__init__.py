"""The routes, and the API formats: how each one reads a request (`parse`) and writes its response.

    app                 the table of routes, and what runs as long as the app does
    app_state           what all routes share, and how they read a body
    model_table         the models by their names: each with its tokenizer, its requests and its workers
    api_formats         what an API format has to offer, and which one a path speaks
    routes/             the life of a request on each kind of route
    openai/             completions, typed events, chat completions, responses
    anthropic/          messages
    ollama/             chat, generate, embed, and the routes around them
    llama_cpp/          completion, infill, and the routes around them
    sglang/             generate
    pooling/            the formats that answer with vectors or scores
    many/               many models, which the launcher loads when requests need them
    adapters/           LoRA adapters, which requests choose by name as models
    tokenize            /tokenize and /detokenize
    receipts/           what proves an answer, and how it is checked
    models, tokenize, prefix_cache      routes that need no generation

The formats share these modules:

    requests/           the base of all request and response types, and how JSON becomes them
    model_context       the model's facts, and checks of a request against them
    prepare             from what a format has read to a GenerationRequest: the steps that all formats share
    truncation, context_length      whether a prompt is shortened; whether it fits, and the words if it does not
    sampling, recommended           how tokens are drawn, and what the checkpoint recommends for it
    response_context    what writing a response needs
    totals              usage and timings of a response
    chat/               chat messages as a prompt, and the features that chats and completions share
    fingerprint         what a frontend adds to a worker's fingerprint
    rooms               a feature whose module is missing is refused in words
"""
