"""One admitted request, without HTTP.

service             starts a request's sequences on the workers; `Generation` hands out their deltas
choice              one choice: its stream of tokens becomes deltas of text
"""
