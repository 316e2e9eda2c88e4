"""Operations that compute each row alone.

norm                RMS norm and layer norm
rotary, store_kv    rotary embedding; writes K/V into the cache
qkv_rope_write      norm, rotary and store_kv in one pass
activate, act_and_mul       the activation of a feed-forward network without and with a gate
output_gate         the output gate of attention
quantize            converts eight-bit numbers
split_k             adds partial sums of a matrix product
"""
