"""A frontend process: it reads HTTP requests, has a worker compute them, and streams the answers.

It never imports torch.

__main__            one process: opens the port, loads the tokenizer, serves, drains
errors, request     exceptions with their HTTP status; a validated request and its deltas
turns               long work in threads and child processes, shared fairly between tenants
features            optional features of a request, as plain values
server/             connections, TLS, authentication, middleware, server-sent events
api/                the routes, and the requests and responses of each API format
generation/         one request: its sequences, its choices, their deltas
text/               tokenizer, chat template, detokenizer, stop strings, grammars
pictures/           reads and decodes pictures in chats, and puts them into prompts
output_parser/      reasoning and tool calls in the generated text
workers/            the worker pool: discovery, membership, routing, connections, streams
observability/      access log, metrics, statistics, tracing
offline/, llm       generation from Python, without HTTP: the class `LLM`, and the module to import it from
web/                the page at `/`
"""
