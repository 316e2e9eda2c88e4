"""Child processes, signals and heartbeats.

expendable          a child process for work that may crash or hang
fair_queue          places for long work, with a limit for each tenant
grammar_trial       builds a grammar in an expendable child, to see whether it can be built
stop_requests       tells a repeated stop signal from a second request to stop
heartbeat           a process's heartbeat file, read by the launcher
"""
