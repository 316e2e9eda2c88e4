"""A frontend: reads HTTP requests, has a worker compute them, streams the answers. In the order of a request:

    __main__                    one process: opens the port, loads the tokenizer, drains
    http, limits, tls           a connection, and what it may cost
    border, keys, errors        who may come in; exceptions become answers
    app                         the routes: read, parse, start, write
    types                       `Ask` and `Delta`: what dialects and service say to each other
    protocols/                  the dialects: JSON to Ask, Deltas to JSON
    template                    a chat as a prompt's text
    tokenizer, checkpoint       text to ids, as the checkpoint's files have it
    grammar, closed_schema      what an answer must look like
    service, choice             one request: its sequences, and the Deltas of each
    fleet                       the workers as one; beneath it:
    places, roster, routing     which workers there are, and which one gets a request
    link, stream                the wire to one worker; one sequence's output
    text, stops                 ids to text as they come, up to a stop string
    speech/                     thoughts and calls in that text
    sse                         events to the socket

Beside the way of a request:

    workers, stats, metrics     what /ready, /stats and /metrics say
    accesslog, observers, traces    what is told of each request when it has ended
    openapi, playground, web/   the description of the API, and the page
    llm                         the same from Python, without HTTP; it uses asks, many, background, pieces
"""
