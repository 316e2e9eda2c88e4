"""Matrix products with plain and with quantized weights.

linear              linear with plain weights, or with weights of eight bits and a scale per row
quantized_linear    linear with weights of four or eight bits and a scale per group
packed_codes        packs a weight of four or eight bits in the order in which these kernels read it
dequantize          turns codes into numbers, in registers
chains, code_chains one chain of additions over K for a tile, with plain and with quantized weights
parked_linear       linear with the largest tiles where K has several chains
linear_norm         linear whose last program computes the norm that follows
prefetch_branch     loads weights into the L2 cache while attention runs
adapter_products    adds the products of all LoRA adapters of a step to a linear
tiles               how matrix products split K, and which tiles they use
tile_table          the tiles as data: rules, measured_tiles.json, and candidates for a measurement
"""
