"""The edge of a frontend: what stands between a socket and a route.

http_protocol       uvicorn's HTTP protocol with limits on every connection
connection_limits   how many connections, how large, how slow
tls                 certificates, and closing TLS connections
middleware          request ids, authentication, exceptions as responses
auth                the file of API keys
sse                 server-sent events, written to the socket
playground          the files of the page at `/`
"""
