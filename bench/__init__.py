"""Benchmarks: `sluice bench`. Every report names its command. A bench that needs httpx or psutil, which `make run` does
not install, says so (packages.py); `make bench` installs both.

quick               `make bench`: the server compared with transformers_loop, a plain transformers generate loop
workloads/          workloads in several modes, with a report in HTML
client/             the load client, and its measurements
peers/              the same load on vLLM, llama.cpp and transformers
gpu/                correctness and speed of one GPU
simulate/           the scheduler in virtual time: `sluice simulate`
real/               the quality of weight formats on a real model and real English
many_models         a soak test with more models than fit in memory, while processes are killed
adapter_changes     LoRA adapters that are loaded and unloaded while streams run
ranks/              one model on several processes: faults, and the cost of checking the other processes
model_switch        seconds to the first token when a request needs another model, compared with llama.cpp's router
parsing             the time to parse a plain request, compared with another checkout of Sluice
micro/              single parts: a frontend's cost per token, a worker step, CPU kernels, features
checkpoints         random checkpoints in real shapes
gptq_checkpoint     converts a checkpoint to GPTQ's layout
awq_checkpoint      converts a checkpoint to AWQ's layout
score               perplexity, and closeness to the unquantized model
"""
