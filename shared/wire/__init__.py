"""ZeroMQ sockets, their keys and addresses, and the encoding of messages.

sockets, curve, address     ZeroMQ sockets, their keys, worker addresses
codec               the encoding of messages
"""
