"""The table of a server's models, and the messages about models between the launcher and the frontends.

durations           how long a model stays loaded, as users write it
entries             the entries of the table, read from a file or found in a folder
messages            the messages on the launcher's control socket, and their frames
"""
