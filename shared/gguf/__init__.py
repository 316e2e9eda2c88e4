"""GGUF files as checkpoints: the metadata of a file becomes the files of a Hugging Face checkpoint."""
