"""A coding agent's session, the same for every server."""
