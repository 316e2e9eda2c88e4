"""Turns chat messages into a prompt; also holds the features that chats and completions share.

chat_prompt         turns chat messages into a prompt
own_template        a request's own template, its documents, and roles that only some templates know
picture_prompt      the prompt of a chat with pictures
untrusted           keeps text from clients from becoming special tokens
call_history        messages for a chat template, with tool calls in the form that the template can show
tool_fields, tools                                the tools, and which of them an answer may or must call
structured_output_fields, structured_output       the form that an answer must have, as a grammar
thinking_fields, thinking_budget                  whether the model reasons, and for how many tokens at most
samplers            llama.cpp's chain of samplers, for requests that ask for it
dry_breakers        the tokens that end a repetition for the sampler DRY
continuation_fields, continuation                 continues an earlier answer from a given token
"""
