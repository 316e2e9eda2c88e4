"""A frontend process: it reads HTTP requests, has a worker compute them, and streams the answers."""
