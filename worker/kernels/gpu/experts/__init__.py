"""The feed-forward network of a mixture of experts.

experts             runs all kernels of a mixture of experts
routing             chooses the experts of each row, and groups the rows by expert
grouped_linear, quantized_grouped_linear: one linear of many experts, with plain and with quantized weights
packed_experts      the quantized weights of many experts in memory
"""
