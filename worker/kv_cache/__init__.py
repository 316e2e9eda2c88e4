"""The pool of K/V pages."""
