"""Models, steps and tools that several measurements share."""
