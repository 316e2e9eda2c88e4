"""The bounds that frontends keep to and workers check."""

MAX_PIXEL_BYTES = 48 << 20  # of a request, as the model sees its pictures: a message has at most 64 MiB
MAX_PATCHES = 1 << 14  # of a picture
