"""Chains of samplers (shared/messages/samplers.py), which few requests ask for. A worker that gets none loads nothing.

chain               runs the samplers of a row, and of a batch
truncation          the samplers that drop tokens: top-k, top-p, min-p, typical, top-n-sigma, XTC
mirostat            the sampler that keeps the surprise of tokens near a target
repetition          the samplers that look at the tokens before: penalties in a window, DRY
"""
