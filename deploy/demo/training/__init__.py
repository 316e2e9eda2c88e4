"""How the demo model was trained.

facts, questions, stories   what the model is taught
corpus, batches     the training text, as batches of ids
train, check        the training; what the trained model must know
"""
