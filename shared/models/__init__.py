"""The table of a server's models, and what its launcher and its frontends tell each other about them.

durations           how long a model stays loaded, as people write it
entries             the entries of the table, read from a file or found in a folder
messages            the messages on the launcher's control socket, and their frames
"""
