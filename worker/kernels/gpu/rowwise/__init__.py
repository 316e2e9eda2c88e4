"""Operations that compute each row alone.

norm                RMS norm and layer norm
rotary, store_kv    rotary embedding; writes K/V into the cache
qkv_rope_write      norm, rotary and store_kv in one pass
activate, act_and_mul       the activation of a feed-forward network without and with a gate
output_gate         the output gate of attention
quantize            converts weights of eight bits, and quantizes tokens to eight bits
split_k             adds up the partial sums of a matrix product
"""
