"""The C functions for recurrent layers, for tensors.

delta_net           the gated delta rule, for tensors
mamba2              Mamba-2, for tensors
recurrent_c         a recurrent layer without its linears, for decoder_c
short_conv          short convolutions, for tensors
"""
