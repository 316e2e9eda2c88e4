"""Decoder-only models. One decoder serves all model families; a family is described by data."""
