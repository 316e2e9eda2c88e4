"""Reads quantized checkpoints: their `quantization_config`, and their tensors, which become QuantizedWeights.

methods             chooses the reader by `quant_method`
compressed_tensors  `compressed-tensors`: 4 and 8 bits
fp8                 `fp8` of Qwen and DeepSeek
gptq                `gptq`: 4 and 8 bits
awq                 `awq`: 4 bits
mxfp4               `mxfp4` of gpt-oss: 4 bits
bitsandbytes        `bitsandbytes`: nf4 and fp4
scaled              reads a weight that is stored as values and a grid of scales
codes               unpacks stored codes, and checks settings
in_memory           how linears are kept in memory: as stored, quantized while loading, or widened
"""
