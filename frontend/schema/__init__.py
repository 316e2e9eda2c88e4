"""The base of all request and response types, and how JSON becomes them."""
