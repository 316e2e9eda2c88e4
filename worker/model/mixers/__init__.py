"""Mixers: the part of a layer that mixes a row with the rows before it. Each kind of mixer is one file.

kinds           the functions that a kind must have, and the kinds by name
attention       attends to keys and values in the cache
delta_net       the gated delta rule (Gated DeltaNet), with a recurrent state
mamba2          Mamba-2, with a recurrent state
short_conv      the short convolution of LFM2, with a recurrent state
recurrent       helpers of the kinds with a recurrent state

The kernels are in worker/kernels.
"""
