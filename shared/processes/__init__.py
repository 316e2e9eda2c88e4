"""Child processes, signals and heartbeats.

expendable          a child process for work that may crash or hang
fair_queue          work that takes long: each tenant has at most one place
grammar_trial       builds a grammar in such a child, to see whether it can be built
stop_requests       repeats of a signal to stop, and a second request
heartbeat           a process's heartbeat file, read by the launcher
"""
