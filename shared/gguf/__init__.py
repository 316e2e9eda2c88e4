"""GGUF files as checkpoints: the metadata of a file becomes the files of a Hugging Face checkpoint.

naming          which files a name means: a file, a folder, split files, a quantization in a hub repository
tower_file      which file holds the vision tower beside a model
hub             fetches the files of a quantization
translated      makes the folder of translated files in a process of its own, and keeps it in a cache
index           where the tensors lie in the files, for the worker
config/             a file's metadata as config.json
container       reads metadata and the places of tensors, with the library `gguf`
text/               a file's metadata as tokenizer.json and the settings of text
errors          the error that all modules here raise

Frontends must not load numpy, which `gguf` needs. So only the process that `translated` starts imports `container`;
every other process reads the folder.
"""
