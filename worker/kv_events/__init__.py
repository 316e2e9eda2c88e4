"""Reports the contents of the prefix cache: pages to external routers, over ZeroMQ in vLLM's format
(--kv-events-endpoint), and prefixes to this server's frontends, in each Status.

events              the messages to external routers
journal             collects the pages that were stored and evicted since the publisher last took them
publisher           a thread that publishes the events, and sends them again to consumers that missed some
start               makes journal and publisher from the settings
prefix_report       the report about prefixes for this server's frontends
"""
