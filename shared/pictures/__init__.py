"""What frontends and workers must agree on about pictures.

digest      the hash of a picture
identity    a prompt with its pictures, for whoever compares prompts
"""
