"""Answers that are kept in a file, so that they outlive their client, their connection and their process."""
