"""Tells routers what the prefix cache has: routers outside its pages, over ZeroMQ in vLLM's format
(--kv-events-endpoint), and the frontends of this server its prefixes, in each Status.

events              the messages
journal             what the scheduler has stored and evicted since the publisher last asked
publisher           a thread that sends it, and sends it again to who missed a part
start               makes both, as the settings say
prefix_report       the prefixes, for the frontends
"""
