"""Connects the worker with the frontends over ZeroMQ.

server              the ZeroMQ sockets, on an I/O thread
auth                decides which public keys may connect
"""
