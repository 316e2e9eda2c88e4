"""Images: a vision encoder turns an image into vectors, which replace the embeddings of its placeholder tokens."""
