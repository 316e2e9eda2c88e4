"""Pictures: a vision encoder turns a picture into vectors, which replace the embeddings of its placeholder tokens.

spec            what a vision tower is, as data
checkpoint      loads the tower of a checkpoint
preprocess      pixels as the encoder reads them
attention       attention among all patches of a picture, by the paged kernels
windows         windows of patches: a patch attends only to patches of its own window
positions       position embeddings of patches, by their row and column
rotary          M-RoPE: the three positions of tokens
encoder         the forward pass of a tower, in pieces
sandwich        layers of Gemma 4, with norms before and after attention and MLP
embedder        a model without a tower: linears turn pixels directly into tokens
connectors      turn patches of a tower into tokens of the text model
vision          a loaded tower, with a cache of encoded pictures
between_steps   encodes, piece by piece between steps, the pictures that sequences wait for
step            the rows that pictures replace in a step
admission       checks the pictures of a request
metrics         Prometheus metrics: encoded pictures, seconds, cache hits
"""
