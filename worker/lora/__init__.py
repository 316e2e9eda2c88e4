"""LoRA adapters: an adapter adds the product of two low-rank matrices to the outputs of linear layers.

sites               finds the linear layers that an adapter can change, by module name
stored              reads the matrices in an adapter's files, by module name
from_gguf           does the same for a GGUF file, with the names and row orders of llama.cpp
loaded              an adapter in memory: its packed matrices for each linear layer
store               keeps adapters in memory, and reads them in a thread
metrics             reports to Prometheus which adapters run and wait
operations          the operations of a step in which some rows have an adapter
on_gpu              adds the products of all adapters of a step together, on a GPU
experts             computes the experts of rows whose adapter changes experts
"""
