"""Trains the demo model.

facts, stories      read facts.toml and stories.toml, from which the model learns
exchange            a question with its answer; the wordings in questions.toml
questions, number_questions     families of questions
corpus, batches     the training text, as batches of ids
train, check        the training; questions that test what the model has learnt
head, train_head    the MTP head, which proposes draft tokens, and its training
"""
