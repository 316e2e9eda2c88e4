"""Makes tokenizer.json and the settings of text from the metadata of a GGUF file.

tokenizer       tokenizer.json
pre_tokenizers  how byte-level BPE splits text, by tokenizer.ggml.pre
text_settings   tokenizer_config.json and generation_config.json
"""
