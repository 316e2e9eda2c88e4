"""The life of one admitted request, without HTTP.

service             submits the sequences of all requests; knows all running requests, and drains them
generation          one admitted request: notifies, and is polled for the deltas of its choices
windows             a request with many prompts, which are submitted a few at a time
choice              one choice: turns its stream of tokens into deltas of text

The other modules implement optional features (frontend/features.py), as changes to the deltas of a choice:

extras              selects the features that a request asks for
continued           an output that continues an earlier one
time_limit          ends an output after a given time
token_scores        log-probabilities of the output and of the prompt
echo                the prompt in front of the output
progress            usage and times while a stream runs
endings             data for the last delta: the output's ids for a receipt, a vector, a prompt's scores
"""
