"""The records of a sequence besides its tokens: three that every sequence has, and one for each feature.

turn                its place in the queue: tenant, priority, group, deadline
history             its times and counts so far
shared_prefix       its digests in the prefix cache
constraint          the interface of rules for the output, such as a grammar
adjustment          penalties, biases and min_tokens
token_counts        counts the tokens of a sequence, for penalties
adapter_use         the LoRA adapter that the sequence is computed with
pictures            the pictures of a prompt, and where their tokens are in it
chain_check         checks the values of a chain of samplers
mirostat            the state of the Mirostat sampler for a sequence
replay              computes existing output again
answer_check        compares the output with an answer
prediction          a text that the client expects as the output
prompt_scores       the tokens of a prompt that are scored
sequence_states     the slots for recurrent states that one sequence has
"""
