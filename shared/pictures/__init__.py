"""Code for pictures that frontends and workers share, so that they agree.

digest      the hash of a picture
data_url    a picture's file as a data: URL, as in requests
limits      limits on pictures, which frontends enforce and workers check
identity    a prompt with digests in place of its pictures, for comparing prompts
"""
