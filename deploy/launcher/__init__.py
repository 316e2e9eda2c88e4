"""Starts the processes of a server and keeps them running.

serve               `sluice serve`: from settings to running processes
supervisor          starts children, restarts them, stops them
child_process       one child: its process, its restarts, its backoff
child_command       the command line of a child
models/             many models in one server: which models are loaded
packaged_model      the default model, fetched from a Python package
watchdog            detects children that hang
readiness           polls /ready
placement           which worker gets which GPU, threads and port
listen_sockets      the listening sockets, one for each frontend, which stay open across restarts
run_dir             the folder of sockets, heartbeats and logs
console             log lines of children
parent_death        children end when their parent dies
embedded_worker     a worker owned by one Python process, for `LLM`
"""
