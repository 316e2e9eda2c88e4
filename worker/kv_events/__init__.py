"""Tells routers outside which pages the prefix cache has, over ZeroMQ in vLLM's format (--kv-events-endpoint).

events              the messages
journal             what the scheduler has stored and evicted since the publisher last asked
publisher           a thread that sends it, and sends it again to who missed a part
start               makes both, as the settings say
"""
