"""Reads quantized checkpoints: their `quantization_config`, and their tensors, which become QuantizedWeights."""
