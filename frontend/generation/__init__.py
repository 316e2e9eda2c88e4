"""One admitted request, without HTTP.

service             submits the sequences of all requests; knows which requests are alive, and drains them
generation          one admitted request: notifies, and is polled for the deltas of its choices
windows             a request of many prompts, of which some are submitted at a time
choice              one choice: its stream of tokens becomes deltas of text

Beside this path, what only some requests ask for (frontend/features.py), as changes to the deltas of a choice:

extras              which of the following a request has
continued           an output goes on from an earlier one
time_limit          an output ends after so many milliseconds
token_scores        log-probabilities of the output and of the prompt
echo                the prompt stands before the output
progress            usage and times while a stream runs
endings             a receipt's ids, a vector, a prompt's scores with the last delta
"""
