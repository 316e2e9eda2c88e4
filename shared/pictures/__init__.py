"""What frontends and workers must agree on about pictures.

digest      the hash of a picture
"""
