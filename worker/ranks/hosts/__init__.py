"""Ranks on several hosts: how they find each other, and prove that they belong together. After that, rows go by TCP.

group               which rank this process is, by torchrun's variables or LeaderWorkerSet's
handshake           both ends of a connection prove that they have the worker's key
links               connections that notice within seconds when the other end is gone
door                lets in who has the key
rendezvous          rank 0 gathers all others, and they connect to each other
"""
