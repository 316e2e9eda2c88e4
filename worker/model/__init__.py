"""Decoder-only models. There is one decoder; families are data.

forward_inputs      the input of a forward
spec                a model as data: sizes, norms, biases, layers
decoder             the forward: one plain loop over the layers
cpu_decoder         the same with its loop in C, on the CPU
rope                tables of rotary embeddings
families, rope_settings     from config.json to a spec
checkpoint, staging         tensors by name; reading files ahead into device memory
weights, quantization       from a checkpoint's tensors to the decoder's weights; eight-bit weights
device              chooses and checks the device
"""
