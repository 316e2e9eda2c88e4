"""Encoders: models that compute a whole text at once, in both directions, without a K/V cache."""
