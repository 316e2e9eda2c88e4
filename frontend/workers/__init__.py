"""The worker pool, as one frontend sees it.

pool                treats all workers as one: chooses a worker for a stream, moves streams when a worker is lost
discovery           worker addresses from flags, a file or DNS
membership          the workers that belong to the pool, and whether they are compatible
picture_memory      bounds the pixels that a frontend keeps for its streams
placement           which worker has which stream, and how many tokens each worker still has to compute
routing             chooses the worker for a request by load and prefix affinity
reported_prefixes   which prefixes the workers have in their caches, as they report
connection          the connection to one worker: handshake, leases, repair
listener            the events that a connection reports to the pool
stream              the output of one sequence, in order and without gaps
prefix_reset        empties the prefix caches of all workers
status              connection states, and the latest report of each worker
"""
