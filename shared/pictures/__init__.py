"""What frontends and workers must agree on about pictures.

digest      the hash of a picture
data_url    a file as the URL that requests have
identity    a prompt with its pictures, for whoever compares prompts
"""
