"""Mixers: the part of a layer that mixes a row with those before it. A kind is a file, which knows all about it.

kinds           what a kind is, and the kinds by name
attention       attends to keys and values in the cache
delta_net       the gated delta rule (Gated DeltaNet), with a state
mamba2          Mamba-2, with a state
short_conv      the short convolution of LFM2, with a state
recurrent       what kinds with a state have in common

The kernels are in worker/kernels.
"""
