"""Compares Sluice with vLLM, llama.cpp and transformers on the same weights: `python -m bench.peers`."""
