"""Chains of samplers (shared/messages/samplers.py). These modules are loaded by the first request with a chain.

chain               runs the chains of samplers of the rows of a batch
truncation          the samplers that drop tokens: top-k, top-p, min-p, typical, top-n-sigma, XTC
mirostat            the sampler that keeps the surprise of tokens near a target
repetition          the samplers that look at earlier tokens: penalties in a window, DRY
"""
