"""What frontends, workers and the launcher have in common. Imports nothing of theirs.

messages, codec             what goes over the wire, and its bytes
sockets, curve, address     ZeroMQ sockets, their keys, where workers listen
config, flags, rules        the settings, their reading, and what must fit together
arguments                   kinds of values for flags that are no settings
sizes, machine              defaults that depend on the machine, and what it has
hub                         checkpoints from the Hugging Face hub
pulse                       a process's sign of life, for the launcher
outlet                      log lines that never make their writer wait
"""
