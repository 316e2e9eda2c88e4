"""OpenAI's API formats. Each `…_input` has the type of the request and its prompt, each `…_output` parsed answers.

completions, completions_input                 text completions
typed_events                                   typed events, on the route of completions
chat, chat_input, chat_output                  chat completions; they stream the same kind of chunks as completions
responses, responses_input, responses_output   responses
    response_types, responses_types     the types of the responses: of completions and chat; of responses
"""
