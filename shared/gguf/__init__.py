"""GGUF files as checkpoints: the metadata of a file becomes the files of a Hugging Face checkpoint.

naming          which files a name means: a file, a folder, split files, a quantization in a hub repository
tower_file      which file holds the vision tower beside a model
hub             fetches the files of a quantization
translated      the folder of translated files, kept in a cache; makes it in a process of its own
index           where the tensors lie, for the worker
config/             a file's metadata as config.json
container       reads metadata and the places of tensors, with the library `gguf`
text/               a file's metadata as tokenizer.json and the settings of text
errors          the error of all of them

Frontends must not load numpy, which `gguf` needs. So only the process that `translated` starts imports `container`;
every other process reads the folder.
"""
