"""Calls the C library's functions for recurrent layers with tensors.

delta_net           the gated delta rule
mamba2              Mamba-2
short_conv          the short convolution
recurrent_c         passes a recurrent layer to the library, and runs it alone
"""
