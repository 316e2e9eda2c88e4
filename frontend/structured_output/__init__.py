"""Grammars of answers: what of a JSON schema, a tool or a user's grammar can be enforced, and how."""
