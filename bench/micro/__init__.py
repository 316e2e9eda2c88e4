"""Measurements of one part each. Most modules are commands: `python -m bench.micro.NAME`.

frontend            CPU time of a frontend per token, stream and request; scripted_worker feeds it
scripted_worker     a worker without a model, and a client that reads many streams
asgi_floor          a server that does nothing: the lower bound for a frontend
text                detokenizing, stop strings, encoding
engine              prefill and decode of a loaded model, without HTTP and scheduler
adapters            decode with LoRA adapters, relative to the speed without adapters
step                the worker's time per step outside of the model
kv_events           the cost per page of publishing K/V events
state_cache         prefix cache of a model with recurrent layers, at several spacings of state checkpoints
drafts, grammar, quantization       what these features cost or gain
rounding            rounds weights to the checkpoint formats that `quantization` measures
cpu_kernels         the C library for CPUs compared with this machine's limits
amx_stand_in        the AMX matmul on processors without AMX, with other instructions in its place
"""
