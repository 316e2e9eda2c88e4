"""What a sequence holds beside its tokens: three records that all have, and one for each feature.

turn                what decides when it is its turn
history             what has happened to it
shared_prefix       what it shares through the prefix cache
constraint          what an output must keep to
adjustment          penalties, biases and min_tokens
token_counts        counts the tokens of a sequence, for penalties
adapter_use         the LoRA adapter that the sequence is computed with
pictures            the pictures of a prompt, and where their tokens are in it
chain_check         checks the values of a chain of samplers
mirostat            what Mirostat knows of a sequence
replay              computes output again that exists already
answer_check        compares the output with an answer
prediction          a text that the client expects as the output
prompt_scores       the tokens of a prompt that are scored
sequence_states     the slots that one sequence has
"""
