"""SGLang's own routes: https://docs.sglang.io/basic_usage/native_api.html

generate            /generate: from a body to a GenerationRequest
fields              the fields of its body
output              whole answers, and the events of a stream
response_types      the types of the responses
paths               the description of the routes
"""
