"""The life of one admitted request, without HTTP."""
