"""Drafters that run a model: they propose tokens for all sequences of a step at once.

drafter_base        what both kinds of drafters have in common
draft_model         which model it is, and whether it fits the served one
model_drafter       a small model with the same vocabulary
draft_sequences     what it holds of each sequence: tokens, K/V pages and states
mtp_head            the MTP head of a checkpoint
mtp_drafter         runs it
hidden_rows         hidden states of the served model, which it reads
head_sequences      what it holds of each sequence: hidden states and K/V pages
vocabulary          compares the vocabularies of two checkpoints
"""
