"""Numbers in few bits: weights, activations, keys and values.

eight_bit_kv        rows of keys and values in eight bits, with a scale
quantized_weight    weights of four or eight bits, in groups with a scale
by_rows             converts large tensors in slices, on all cores
quantize            eight-bit weights and activations
"""
