"""Drafters that run a model: they propose tokens for all sequences of a step at once.

drafter_base        what both kinds of drafters have in common
draft_model         which model it is, and whether it fits the served one
model_drafter       a small model with the same vocabulary
draft_sequences     what it holds of each sequence: tokens, K/V pages and states
head_drafter        a layer that reads hidden states of the served model
mtp_head            such a layer: the MTP head of a checkpoint
eagle_head          such a layer: an EAGLE-3 head, which has a checkpoint of its own
eagle_config        what the config of an EAGLE-3 checkpoint says
few_bits            the head over the vocabulary in four bits, for drafts alone
hidden_rows         hidden states of the served model, which heads read
head_sequences      what it holds of each sequence: hidden states and K/V pages
vocabulary          compares the vocabularies of two checkpoints
"""
