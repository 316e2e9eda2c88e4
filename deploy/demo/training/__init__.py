"""How the demo model was trained.

facts, stories      read facts.toml and stories.toml, which hold what the model is taught
exchange            a question with its answer; the wordings in questions.toml
questions, number_questions     families of questions
corpus, batches     the training text, as batches of ids
train, check        the training; what the trained model must know
"""
