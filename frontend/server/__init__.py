"""The HTTP server of a frontend, between the socket and the routes.

http_protocol       uvicorn's HTTP protocol with limits on every connection
http_compat         HTTP/1.0, offers of HTTP/2, TLS clients that send no close_notify
connection_limits   how many connections, how large, how slow
tls                 checks the certificate
bodies              reads bodies; how large one may be, and all together
middleware          request ids, authentication, exceptions as responses
auth                API keys
gateway             what the headers of an inference gateway say of a request's place among others
origins             which web pages may send requests
hosts               which host names requests may be for
sse                 server-sent events, written to the socket
playground          the files of the page at `/`
"""
