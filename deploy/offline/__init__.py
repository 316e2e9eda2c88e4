"""Generation from Python, without HTTP.

llm                 `LLM`: generates with a worker of its own
start               starts the worker of an `LLM`
inputs              prompts and options as requests
contexts            chooses the model, or the model with an adapter, for reading a request
pictures            turns Pillow images and files into the parts of a request
batch               runs many requests with bounded concurrency
pooled              vectors and scores
loop_thread         an event loop in a thread, for synchronous callers
text_stream         the text of an output as an iterator
"""
