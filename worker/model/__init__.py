"""Decoder-only models. One decoder serves all model families; a family is described by data.

forward_inputs      the input of a forward
spec                describes a model as data: sizes, norms, biases, layers
decoder             the forward: one plain loop over the layers
cpu_decoder         the same forward on the CPU, with the loop in C
rope                tables of rotary embeddings
families, rope_settings     make a spec from config.json
family, family_table        what a family is, and the supported ones as rows of data
family_defaults     the defaults of their settings
recurrence          the kinds of recurrent layers, with sizes from a config
gemma4_layers       what differs between the layers of Gemma 4
checkpoint          finds a checkpoint and reads its tensors by name
stacked_tensors     cuts a tensor of all experts into one for each
staging             reads files ahead into device memory
stored_weight       what a checkpoint must offer: tensors by name, and how each weight is stored
source              opens a checkpoint of any file format
quantization/       weights in few bits
gguf/               weights from GGUF files
weights_cache, tensor_file  keep the packed weights on disk
content_hash        the hashes of the files of weights
modules, expert_modules, delta_modules, mamba_modules   which modules of a checkpoint a layer consists of
state_weights       the small weights of recurrent layers
stacked_linear      linears of a checkpoint that are one in memory
layer_inputs        per-layer embeddings
expected_tensors    checks a checkpoint's tensors before any is read
weights             makes the weights of the decoder from those of a checkpoint
weights_size        predicts how many bytes they take
device              chooses and checks the device
"""
