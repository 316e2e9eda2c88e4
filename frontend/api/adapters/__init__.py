"""LoRA adapters as models: a request chooses one by its name. They share the workers of their base model.

registry            which adapters there are, the same in all frontends of a server
fields              what the routes that load and unload adapters, and set default scales, read
paths               the description of these routes
"""
