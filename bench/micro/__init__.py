"""Measurements of one part each. Most modules are commands: `python -m bench.micro.NAME`.

frontend            CPU time of a frontend per token, stream and request; scripted_worker feeds it
scripted_worker     a worker without a model, and a client that reads many streams
asgi_floor          a server that does nothing: the lower bound for a frontend
text                detokenizing, stop strings, encoding
engine              prefill and decode of a loaded model, without HTTP and scheduler
adapters            decode with LoRA adapters, as a share of the speed without
step                what a step costs the worker outside of the model
kv_events           what publishing K/V events costs for each page
state_cache         prompts asked twice of a model with recurrent layers, with several spacings of checkpoints
drafts, grammar, quantization       what these features cost or gain
rounding            formats of few bits for quantization, rounded to nearest
cpu_kernels         the C library for CPUs compared with the floors of this machine
amx_stand_in        the AMX matmul with other instructions in place of AMX
"""
