"""OpenAI's API formats.

completions         text completions; chat completions stream the same kind of chunks
typed_events        typed events, on the route of completions
chat                chat completions; `chat_input` reads the messages, `chat_output` writes reasoning and tool calls
responses           responses; `responses_input` reads the items, `responses_output` writes them
"""
