"""Tries the most fetched releases of models in each form in which people fetch them (`python -m tests.releases`)."""
