"""LoRA adapters: the rows of a sequence with an adapter get a product of two small matrices added behind its linears.

sites               the linears of a model that an adapter can change, by the names of their modules
stored              the matrices in an adapter's files, by the names of their modules
from_gguf           the same of a GGUF file, whose names and orders are llama.cpp's
loaded              an adapter in memory: for each linear the packed product of its modules
store               keeps adapters in memory, and reads them in a thread
metrics             which adapters run and wait, for Prometheus
operations          the operations of a step in which some rows have an adapter
on_gpu              adds the products of all adapters of a step together, on a GPU
experts             of these the experts of a mixture, where an adapter changes them
"""
