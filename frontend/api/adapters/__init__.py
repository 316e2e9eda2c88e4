"""LoRA adapters as models: a request chooses one by its name. They share the workers of their base model.

registry            which adapters there are, the same in all frontends of a server
served              adapters as entries of the table of models
fields              what the routes that load and unload adapters read
routes              /v1/load_lora_adapter and /v1/unload_lora_adapter
paths               the description of these routes
"""
