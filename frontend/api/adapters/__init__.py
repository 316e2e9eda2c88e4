"""LoRA adapters as models: a request selects an adapter by its name. Adapters share the workers of their base model.

registry            all known adapters, the same in all frontends of a server
fields              the request types of the routes that load and unload adapters, and set default scales
paths               describes these routes for /openapi.json
"""
