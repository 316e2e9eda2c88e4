"""The routes of llama.cpp's server that are its own: https://github.com/ggml-org/llama.cpp/tree/master/tools/server

completion          /completion and /completions
infill              /infill
options             the fields that both share, and what they mean in this server's own terms
logit_bias          biases by token id and by text
prompts             texts, ids and mixtures of both as prompts
probabilities       the probabilities of tokens, before and after sampling
output              whole answers and the events of a stream
envelope            errors, and the routes that have them
tokenize            /tokenize and /detokenize, in both vLLM's and llama.cpp's shapes
apply_template      /apply-template
embedding           /embedding and /embeddings
server              what /props, /slots and /lora-adapters tell
response_types      the types of the responses
paths               the description of the routes
"""
