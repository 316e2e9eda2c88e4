"""The API formats: how each format reads a request (`parse`) and writes the response."""
