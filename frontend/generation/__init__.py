"""One admitted request, without HTTP.

service             submits the sequences of all requests; knows which requests are alive, and drains them
generation          one admitted request: notifies, and is polled for the deltas of its choices
windows             a request of many prompts, of which some are submitted at a time
choice              one choice: its stream of tokens becomes deltas of text
"""
