"""llama.cpp's own routes: https://github.com/ggml-org/llama.cpp/tree/master/tools/server

completion          /completion and /completions
infill              /infill
options             the fields that both share, and their translation to this server's fields
logit_bias          biases by token id and by text
prompts             turns texts, ids and mixtures of both into prompts
probabilities       the probabilities of tokens, before and after sampling
output              whole responses, and the events of a stream
envelope            errors
tokenize            /tokenize and /detokenize, for bodies of vLLM and of llama.cpp
apply_template      /apply-template
embedding           /embedding and /embeddings
server              the contents of /props, /slots and /lora-adapters
response_types      the JSON types of the responses
paths               describes the routes for /openapi.json
"""
