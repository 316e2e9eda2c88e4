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
quantization/       weights in few bits
gguf/               weights from GGUF files
weights_cache/      keeps the packed weights on disk
parts/              what one process has of a model that several compute together
mixers/             kinds of mixers: attention, and layers with a state; a file knows all about its kind
feed_forward/       kinds of feed-forward networks: the MLP, and mixtures of experts
layer               the weights of a layer, and of a model
layer_parts         what all kinds of mixers and feed-forward networks have in common
layer_names         the names of a layer's modules and norms in a checkpoint
rooms               imports the modules that only some checkpoints need
layer_inputs        per-layer embeddings
weights             makes the weights of the decoder from those of a checkpoint
weights_size        predicts how many bytes they take
device              chooses and checks the device
"""
