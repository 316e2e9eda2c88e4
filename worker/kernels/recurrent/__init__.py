"""Layers whose sequences have a state instead of K/V: what they compute, in plain PyTorch.

delta_net           the gated delta rule, with a state instead of K/V
mamba2              Mamba-2, another layer whose sequences have a state
short_conv          short convolutions, whose state is their last inputs
recurrent_state     the state of any recurrent layer, in slots
recurrent_torch     what recurrent layers have in common in plain PyTorch
"""
