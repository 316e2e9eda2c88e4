"""The quality of weight formats on a real model and real English: `python -m bench.real`.

formats             the formats, and the files that are made from one GGUF file
dequantized         writes the GGUF file's model as a float32 checkpoint
text                English prose, cut into windows
base_file           the unquantized model's log-probabilities, in llama.cpp's file format
predict             predicts with one engine, in its own process
drafts              gain and cost of drafts on real answers
conversations       prints conversations with a server, for a person to read
"""
