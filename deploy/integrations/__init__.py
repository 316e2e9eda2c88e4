"""Sluice on other platforms: NVIDIA Dynamo and Ray Serve."""
