"""Pictures: a vision encoder turns a picture into vectors, which replace the embeddings of its placeholder tokens.

spec            what a vision tower is, as data
families        the families with a tower that is served, as rows of data
names           the names of a tower's tensors in a checkpoint
preprocess      pixels as the encoder reads them
weights         the weights of a tower and its connector, from a checkpoint
attention       attention among all patches of a picture, by the paged kernels
positions       where a patch is in its picture
rotary          M-RoPE: the three positions of tokens
encoder         the forward of a tower
connectors      what joins patches into tokens of the text model
load            loads the tower of a checkpoint, or says why its pictures are not served
vision          a loaded tower with a cache of what it has encoded
step            the rows that pictures replace in a step
admission       checks the pictures of a request
metrics         pictures, seconds and hits, for Prometheus
"""
