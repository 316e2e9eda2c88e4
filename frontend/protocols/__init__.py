"""The dialects: how each reads a request (`parse`) and words its answer (`stream`, `whole`, `error`, `failure`).

    completions         OpenAI's text completions; its chunks are chat's, too
    events              typed events over the same route
    chat                OpenAI's chat completions: chat_input reads messages, chat_tools words thoughts and calls
    messages            Anthropic's messages: messages_input, messages_tools; messages_frame is what stands around
    responses           OpenAI's responses: responses_input, responses_output
    models, tokenize    what is answered without the worker

Below them, what they share: `fields` reads JSON by a table, `common` has the tables and facts of every request,
`conversation` makes a prompt of messages, `tools` and `constraint` make a grammar of what is asked for. `meanings` and
`answer_schemas` are for /openapi.json only.
"""
