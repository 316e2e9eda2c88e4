"""The formats whose responses are vectors or scores instead of text. ../routes/pooling_route.py runs their requests.

fields              the fields that the formats share, and how inputs become prompts
vectors             collects the vectors of a request from its deltas
embeddings          /v1/embeddings, in OpenAI's format
relevance           how relevant texts are to others: by cosine, by yes and no, or by a classification head
logprobs            /v1/logprobs: log-probabilities of given tokens
    logprob_arrays      encodes these log-probabilities as arrays
score               /v1/score, in vLLM's format
rerank              /v1/rerank, in the format of Cohere and Jina
response_types      the JSON types of the responses
"""
