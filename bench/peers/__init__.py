"""Compares Sluice with vLLM, llama.cpp and transformers on the same weights: `python -m bench.peers`.

catalog             how to install and start each server
servers             runs all servers, with only one active at a time
scenarios           the requests, and the figures computed from their records
serving             CPU time per streamed token around a tiny model
engine              the same comparison without HTTP, for tuning kernels
start               time from the command to the first token, and memory
pictures            time to the first token of questions about pictures, on servers that already run
adapters            decode with LoRA adapters, on servers that already run
llama_cpp           llama.cpp for every instruction set and weight format
gguf_file           writes a checkpoint as GGUF for llama.cpp
gguf_values         the hyperparameters in a GGUF file
gguf_layout         changes tensors as llama.cpp's converter does
random_gguf         writes a GGUF file of a large shape in few bits, with random weights
"""
