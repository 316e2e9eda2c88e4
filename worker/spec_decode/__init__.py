"""Drafters that run a model: they propose tokens for all sequences of a step at once.

drafter_base        the base class of both kinds of drafters
draft_model         finds the draft model, and checks that it fits the served model
model_drafter       drafts with a small model that has the same vocabulary
draft_sequences     the data of model_drafter for each sequence: tokens, K/V pages and states
head_drafter        drafts with a draft head: one layer that reads hidden states of the served model
mtp_head            a draft head: the MTP head of a checkpoint
eagle_head          a draft head: an EAGLE-3 head, which has its own checkpoint
eagle_config        reads the config of an EAGLE-3 checkpoint
few_bits            quantizes the output head over the vocabulary to four bits, for drafts only
hidden_rows         gives draft heads the hidden states of the served model
head_sequences      the data of head_drafter for each sequence: hidden states and K/V pages
vocabulary          compares the vocabularies of two checkpoints
"""
