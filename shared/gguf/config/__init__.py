"""Makes config.json from the metadata of a GGUF file.

hyperparameters reads the architecture's values in the metadata
stated_numbers  tensors that the metadata states as numbers
config          makes config.json
architectures   the architectures that are served, as rows
dense, mixtures, hybrids    values that only dense models, only models with experts, or only recurrent models have
gemma4          values that only Gemma 4 has
windows         which layers have a sliding window
rotary          rotary scaling
towers          what a vision tower in a file of its own adds to config.json
pooling         how vectors are pooled, for embedding models
"""
