"""The operations of layers with a recurrent state instead of K/V, in plain PyTorch.

delta_net           the gated delta rule (Gated DeltaNet)
mamba2              Mamba-2
short_conv          the short convolution, whose state is its last inputs
recurrent_state     the states of a recurrent layer, in slots
recurrent_torch     helpers for recurrent layers in plain PyTorch
"""
