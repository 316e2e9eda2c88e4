"""Quantization of weights, activations, keys and values.

eight_bit_kv        keys and values of eight bits, with a scale per row
quantized_weight    weights of four or eight bits, with a scale per group
by_rows             converts large tensors in slices, on all cores
quantize            weights and activations of eight bits, with a scale per row
"""
