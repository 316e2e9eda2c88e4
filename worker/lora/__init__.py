"""LoRA adapters: an adapter adds the product of two low-rank matrices to the outputs of linear layers."""
