"""A load client."""
