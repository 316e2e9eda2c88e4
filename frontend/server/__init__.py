"""The HTTP server of a frontend, between the socket and the routes."""
