"""Decides which tokens are computed next, in plain integers: no tensors, no sockets, no clock (callers pass `now`)."""
