"""The life of a request on each kind of route.

generate            the routes that generate: parse the body, start the generation, write the response
pooling_route       the routes that answer with vectors or scores: the life of such a request
invocations         /invocations, which goes to one of these by the body's fields
render              vLLM's render routes: what a request would be computed with, without a worker
verify_route        /v1/receipts/verify: the life of a check
adapters            the routes that load and unload LoRA adapters, and set their default scales
reports             the routes that report: health, statistics, metrics, models, the description of the API
models, prefix_cache        the list of models; the route that empties the prefix cache
render              vLLM's render routes: the token ids of a request, without a worker
sglang              SGLang's routes about the model and the server
openapi             the description of the API at /openapi.json
body_types          the types of all bodies, by their names there
"""
