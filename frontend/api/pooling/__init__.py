"""The formats whose responses are vectors or scores instead of text. frontend/routes/pooling.py runs their requests."""
