"""The base of all request and response types, and how JSON becomes them.

request_model       the base of all request types, and the refusals that name a field
decoding            decodes a body into its type, or refuses it
not_json            the error for a body that is not JSON
unsupported         explains why fields of other servers are refused
unknown_fields      refuses fields that no type declares, or ignores and reports them
request_types       the fields that the formats share, as types
likely_tokens       limits how many of the likeliest tokens a request may ask for
sampler_fields      the fields of llama.cpp's samplers, which few requests have
request_schema      a request type as a JSON schema
response_types      the base of all response types
telemetry           llama.cpp's timings and progress, in its own answers and in the streams of other formats
keyword_struct      structs with keyword-only fields
encoding            values as JSON
"""
