"""The scheduler's part of features that only some models or settings need.

features            makes the parts of a scheduler that only some models or settings need
drafts              the tokens of a chunk that are guessed: which are right, and a chunk without them
speculation         proposes draft tokens if they are worth computing
predicted           proposes what follows in a text that the client expects
waiting_drafts      drafts of a model, which wait until they are planned
states              gives slots for recurrent states to sequences
"""
