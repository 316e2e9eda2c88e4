"""GGUF files as checkpoints: the metadata of a file becomes the files of a Hugging Face checkpoint.

naming          which files a name means: a file, a folder, split files, a quantization in a hub repository
hub             fetches the files of a quantization
translated      the folder of translated files, kept in a cache; makes it in a process of its own
index           where the tensors lie, for the worker
stated_numbers  tensors that the metadata states as numbers
container       reads metadata and the places of tensors, with the library `gguf`
config          config.json
architectures   the architectures that are served, as rows
dense, mixtures, hybrids    what only some of them have in config.json: dense ones, those with experts, recurrent ones
gemma4          what only Gemma 4 has in it
windows         which layers have a sliding window
rotary          its rotary scaling
pooling         how vectors are pooled, for embedding models
hyperparameters the values of an architecture, of which none may stay unread
tokenizer       tokenizer.json
pre_tokenizers  how byte-level BPE splits text, by tokenizer.ggml.pre
text_settings   tokenizer_config.json and generation_config.json
errors          the error of all of them

Frontends must not load numpy, which `gguf` needs. So only the process that `translated` starts imports `container`;
every other process reads the folder.
"""
