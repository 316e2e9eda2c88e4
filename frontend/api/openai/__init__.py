"""OpenAI's API formats. `…_input` modules read requests and make prompts; `…_output` modules write parsed answers.

completions, completions_input                 text completions
    token_details                       token ids and the prompt's log-probabilities, in completions and chat
    telemetry                           llama.cpp's timings and progress, in the streams of all three APIs
typed_events                                   typed events, on the route of completions
chat, chat_input, chat_output                  chat completions; their streams use the chunks of completions
    prediction                          a text that the client expects as the answer
    content_parts                       the parts of a chat's messages: texts, pictures, thoughts, refusals
    message_rules                       what a chat's message must satisfy beyond its types
responses, responses_input, responses_output   the Responses API
    response_types, responses_types     JSON types: of completions and chat; of the Responses API
"""
