"""Generation from Python, without HTTP.

llm                 `LLM`: generates with a worker of its own
start               starts that worker
inputs              prompts and options as requests
contexts            the model that reads them, or the model with an adapter
pictures            images of Pillow and files, as requests have them
batch               runs many requests with bounded concurrency
pooled              vectors and scores
loop_thread         an event loop in a thread, for synchronous callers
text_stream         the text of an output as an iterator
"""
