"""The worker's end of the wire.

server              the ZeroMQ sockets, on an I/O thread
auth                which public keys may connect
"""
