"""Starts the processes of a server and keeps them running."""
