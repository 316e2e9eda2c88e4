"""What frontends and workers must agree on about pictures.

digest      the hash of a picture
data_url    a file as the URL that requests have
limits      the bounds that frontends keep to and workers check
identity    a prompt with its pictures, for whoever compares prompts
"""
