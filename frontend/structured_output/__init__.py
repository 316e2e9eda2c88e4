"""What of a JSON schema a grammar can enforce."""
