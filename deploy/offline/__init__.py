"""Generation from Python, without HTTP."""
