"""How the demo model was trained.

facts, stories      what the model is taught: readers of facts.toml and stories.toml
exchange            a question with its answer; the wordings in questions.toml
questions, number_questions     families of questions
corpus, batches     the training text, as batches of ids
train, check        the training; what the trained model must know
"""
