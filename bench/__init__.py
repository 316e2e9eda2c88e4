"""Benchmarks: `sluice bench`. Every report names its command.

quick               `make bench`: the server compared with transformers_loop, a plain transformers generate loop
workloads/          workloads in several modes, with a report in HTML
client/             the load client, and its measurements
peers/              the same load on vLLM, llama.cpp and transformers
gpu/                correctness and speed of one GPU
simulate/           the scheduler in virtual time: `sluice simulate`
real/               the quality of weight formats on a real model and real English
many_models         a soak of a server with more models than room, while processes are killed
adapter_changes     LoRA adapters that are loaded and unloaded while streams run
ranks/              several processes that compute one model: faults, and what their checks cost
model_switch        seconds to the first token when a request needs another model, beside llama.cpp's router
parsing             what reading a plain request costs, beside another checkout
micro/              single parts: a frontend's cost per token, a worker step, CPU kernels, features
checkpoints         random checkpoints in real shapes
gptq_checkpoint     writes a checkpoint again in GPTQ's layout
awq_checkpoint      writes a checkpoint again in AWQ's layout
score               perplexity, and closeness to the full model
"""
