"""Triton kernels. Each module holds the GPU form of the operation of the same name one folder above.

norm, rotary, store_kv, qkv_rope_write, attention, linear, activate, act_and_mul, output_gate, experts, delta_net,
mamba2, short_conv, quantize, sample, split_k

quantized_linear    linear with weights of four or eight bits in groups
packed_codes        such a weight as these kernels read it
dependent_launch    starts a kernel before the one before it has ended
dequantize          turns its codes into numbers, in registers
chains, code_chains what products with both kinds of weight do for a tile: one chain of additions over K
recurrent           what the kernels for recurrent layers have in common
routing             chooses the experts of each row, and groups the rows by expert
grouped_linear, quantized_grouped_linear: one linear of many experts, with both kinds of weight
packed_experts      the codes of many experts
prefill_attention   the kernel of attention in which a program attends to all keys of a tile of rows
overlapped_attention: its loop over keys, with the softmax of a block during a product for the next
split_attention     those in which different programs compute the splits of a row's keys
key_splits          where attention splits the keys of a row
work_items          lists the work of attention's programs on the device
online_softmax      the partial softmax that attention computes for blocks of keys and merges
options             ways to launch kernels that are off by default
parked_linear       linear with the largest tiles where K has several chains
linear_norm         linear whose last program computes the norm that follows
prefetch_branch     loads weights into the L2 cache while attention runs
tiles               how matrix products split K, and which tiles they use
tile_table          the tiles as data: rules, measured_tiles.json, and candidates for a measurement
softmax_weights     the softmax weights of a row of logits
top_k_top_p         finds the top-k and top-p limits of a row
"""
