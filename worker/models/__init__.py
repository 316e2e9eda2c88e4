"""Decoder-only models. One decoder serves all model families; a family is described by data.

inputs/             the input of a forward, as a table of columns
decoder             the forward: one plain loop over the layers
cpu_decoder         the same forward on the CPU, with the loop in C
rope                tables of rotary embeddings
families/           makes a spec from config.json: the families as rows of data
config_values       the types and ranges of the values in config.json
family, family_table        what a family is, and the supported ones as rows of data
checkpoint/         finds and reads the tensors of a checkpoint
source              opens a checkpoint of any file format
quantization/       reads weights of quantized checkpoints
gguf/               reads weights from GGUF files
weights_cache/      keeps the packed weights on disk
parts/              which weights a process holds if several processes compute one model together
mixers/             attention, and the kinds of layers with a recurrent state; each file holds all of one kind
feed_forward/       kinds of feed-forward networks: the MLP, and mixtures of experts
layer               the weights of a layer, and of a model
layer_parts         the records that all kinds of mixers and feed-forward networks share
layer_names         the names of a layer's modules and norms in a checkpoint
layer_inputs        per-layer embeddings (Gemma 4)
weights             reads a checkpoint's weights and packs them for the decoder
weights_size        predicts how many bytes the weights take in memory
device              chooses and checks the device
"""
