"""Runs a step on the device. Every module that works on both plans and tensors is here."""
