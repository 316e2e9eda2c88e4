"""Decoder-only models. One decoder; families are data.

packed                      the input of a forward
spec                        a model as data: sizes, norms, biases, layers
decoder                     the forward
rope                        tables of rotary angles
families, rope_settings     config.json to spec
checkpoint, staging         tensors by name; reading files ahead into device memory
weights, quantization       a checkpoint's tensors to the decoder's weights; those of eight bits
"""
