"""Layers whose sequences have a state.

delta_net           the gated delta rule
mamba2              Mamba-2
short_conv          short convolutions
recurrent           what these kernels share
"""
