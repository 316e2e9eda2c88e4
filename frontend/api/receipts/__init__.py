"""Receipts: what an answer was made of, so that a server with the same weights can check it.

receipt             the object
making              makes one: what of a request and its answer it holds
sampler_chain       a chain of samplers as a receipt tells it
claim               a receipt and its request as one generation that checks it, and the verdict
verify              reads the request of a receipt as its own route does
"""
