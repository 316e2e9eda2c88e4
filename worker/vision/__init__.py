"""Pictures: a vision encoder turns a picture into vectors, which replace the embeddings of its placeholder tokens.

spec            what a vision tower is, as data
checkpoint      loads the tower of a checkpoint
preprocess      pixels as the encoder reads them
attention       attention among all patches of a picture, by the paged kernels
windows         patches that see those of their window alone
positions       where a patch is in its picture
rotary          M-RoPE: the three positions of tokens
encoder         the forward of a tower, in pieces
sandwich        layers of Gemma 4, with norms before and after attention and MLP
embedder        a model without a tower, whose tokens are linears of pixels
connectors      what joins patches into tokens of the text model
vision          a loaded tower with a cache of what it has encoded
between_steps   encodes, piece by piece between steps, the pictures that sequences wait for
step            the rows that pictures replace in a step
admission       checks the pictures of a request
metrics         pictures, seconds and hits, for Prometheus
"""
