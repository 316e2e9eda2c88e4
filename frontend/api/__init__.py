"""The routes, and the API formats: how each format reads a request (`parse`) and writes the response.

    app                 the table of routes, and the background tasks of the app
    app_state           the objects that all routes share, and how routes read a body
    model_table         looks up a served model by name: its tokenizer, service and worker pool
    api_formats         the interface of an API format, and the table from paths to formats
    routes/             the life of a request on each kind of route
    openai/             completions, typed events, chat completions, responses
    anthropic/          messages
    ollama/             chat, generate, embed, and Ollama's other routes
    llama_cpp/          completion, infill, and llama.cpp's other routes
    sglang/             generate
    pooling/            the formats whose responses are vectors or scores
    many/               many models, which the launcher loads when requests need them
    adapters/           LoRA adapters, which requests select by a model name
    tokenize            /tokenize and /detokenize
    receipts/           records that prove how an answer was made, and the check of such a record

The formats share these modules:

    requests/           the base of all request and response types, and how JSON becomes them
    model_context       facts about the model, and checks of a request against them
    prepare             makes a GenerationRequest from a decoded body: the steps that all formats share
    truncation, context_length      shorten a prompt on request; refuse a prompt that is too long
    sampling, recommended           the sampling parameters of a request, and the checkpoint's defaults for them
    response_context    everything besides the deltas that is needed to write a response
    totals              usage and timings of a response
    chat/               chat messages as a prompt, and the features that chats and completions share
    fingerprint         the frontend's part of the fingerprint
"""
