"""The life of a request on each kind of route.

generate            the routes that generate text: parse the body, start the generation, write the response
pooling_route       the routes whose responses are vectors or scores
invocations         /invocations, which forwards to one of these by the body's fields
render              vLLM's render routes: the token ids and sampling of a request, without a worker
verify_route        /v1/receipts/verify, which checks an answer against its receipt
adapters            the routes that load and unload LoRA adapters, and set their default scales
reports             the routes that report: health, statistics, metrics, models, the API description
models, prefix_cache        the list of models; the route that empties the prefix cache
sglang              SGLang's routes about the model and the server
openapi             the API description at /openapi.json
body_types          the types of all bodies, by their names in the API description
"""
