"""Checkpoints in few bits: what their `quantization_config` says, and how their tensors become QuantizedWeights.

methods             chooses the reader by `quant_method`
compressed_tensors  `compressed-tensors`: 4 and 8 bits
fp8                 `fp8` of Qwen and DeepSeek
gptq, awq           4 bits, of GPTQ also 8
mxfp4               the 4 bits of gpt-oss
bitsandbytes        nf4 and fp4
scaled              a weight that is stored as values and a grid of scales
codes               unpacks stored numbers, and checks them
in_memory           how linears are kept in memory: as stored, quantized while loading, or widened
"""
