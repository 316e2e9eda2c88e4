"""Chat messages as a prompt, and the features that chats and completions share.

chat_prompt         turns chat messages into a prompt
own_template        a template that a request brings, documents, and roles that only some templates know
picture_prompt      the prompt of a chat with pictures
untrusted           what clients write into a chat makes no special token
call_history        messages as chat templates know them, in the form in which each template shows calls
tool_fields, tools                                tools, and which of them an answer may or must call
structured_output_fields, structured_output       the form that an answer keeps to, as a grammar
thinking_fields, thinking_budget                  whether to think, and how much at most
samplers            the samplers of llama.cpp, for requests that ask for one
dry_breakers        the tokens that end a repetition for one of them, DRY
continuation_fields, continuation                 an answer goes on from a place in an earlier one
"""
