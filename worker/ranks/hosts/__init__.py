"""Lets ranks on several hosts find and authenticate each other. After that, they exchange rows over TCP.

group               reads this process's rank from the variables of torchrun or LeaderWorkerSet
handshake           proves to both ends of a connection that the other end has the worker's key
links               TCP connections that notice within seconds when the other end is gone
door                listens on a port, and accepts ranks that have the worker's key
rendezvous          lets rank 0 wait for all other ranks, and connects all ranks with each other
"""
