"""Limits on the pictures of a request, which frontends enforce and workers check."""

MAX_PIXEL_BYTES = 48 << 20  # all resized pictures of a request; a message has at most 64 MiB
MAX_PATCHES = 1 << 14  # patches of one picture
