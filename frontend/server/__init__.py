"""The HTTP server of a frontend, between the socket and the routes.

http_protocol       uvicorn's HTTP protocol with limits on every connection
http_compat         HTTP/1.0, clients that offer HTTP/2, TLS clients that send no close_notify
connection_limits   limits on the number, size and slowness of connections
tls                 checks the certificate
bodies              reads bodies, and limits their size: of each body, and of all bodies together
middleware          request ids, authentication, exceptions as responses
auth                API keys
gateway             tenant and priority of a request, from the headers of an inference gateway
origins             restricts the web pages that may send requests
hosts               restricts the host names that requests may use
sse                 server-sent events, written to the socket
playground          the files of the page at `/`
"""
