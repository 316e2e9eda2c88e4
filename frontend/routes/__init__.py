"""The life of a request on each kind of route."""
