"""The operations that compute each row alone, in plain PyTorch. These forms define what the operations compute.

norm, rotary        RMS norm and layer norm; rotary embedding
store_kv            writes K/V into the cache
qkv_rope_write      norm, rotary and store_kv in one pass, for queries, keys and values
output_gate         the output gate of attention
activate            the activation of a feed-forward network without a gate
act_and_mul         the activation of a feed-forward network with a gate
"""
