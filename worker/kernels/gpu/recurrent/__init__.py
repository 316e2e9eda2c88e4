"""Layers with a recurrent state.

delta_net           the gated delta rule (Gated DeltaNet)
mamba2              Mamba-2
short_conv          the short convolution
recurrent           functions for these kernels
"""
