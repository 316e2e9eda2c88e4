"""The routes that answer with vectors or scores instead of text; the life of such a request is in ../pooling_route.py.

fields              the fields that the formats share, and how inputs become prompts
vectors             the vectors of a request, from its deltas
embeddings          /v1/embeddings, as OpenAI has it
relevance           how relevant texts are to others: by cosine, by yes and no, or by a classification head
logprobs            /v1/logprobs: log-probabilities of tokens that exist already
    logprob_arrays      the forms in which clients get them
score               /v1/score, as vLLM has it
rerank              /v1/rerank, as Cohere and Jina have it
response_types      the types of the responses
"""
