"""Checks whether the GPU computes correctly: section `correct`."""
