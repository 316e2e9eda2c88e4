"""The scheduler's part of features that only some models or settings need.

features            makes the parts of a scheduler that only some models or settings need
drafts              the tokens of a chunk that are guessed: which are right, and a chunk without them
speculation         proposes draft tokens if they are worth computing
states              gives slots for recurrent states to sequences
"""
