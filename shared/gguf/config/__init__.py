"""A file's metadata as config.json.

hyperparameters

stated_numbers  tensors that the metadata states as numbers
config          config.json
architectures   the architectures that are served, as rows
dense, mixtures, hybrids    what only some of them have in config.json: dense ones, those with experts, recurrent ones
gemma4          what only Gemma 4 has in it
windows         which layers have a sliding window
rotary          its rotary scaling
towers          what a vision tower in a file of its own adds to it
pooling         how vectors are pooled, for embedding models
"""
