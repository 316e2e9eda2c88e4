"""The quality of weight formats on a real model and real English: `python -m bench.real`.

formats             the formats, and the files that are made from one GGUF file
dequantized         that file as a checkpoint in float32
text                English prose, and the windows it is cut into
base_file           the full model's log-probabilities, in llama.cpp's file format
predict             predicts with one engine, in a process of its own
drafts              gain and cost of drafts on real answers
conversations       prints conversations with a server, to be read as a user would
"""
