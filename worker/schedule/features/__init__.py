"""The parts of the scheduler that only some models or settings need.

features            makes these parts if they are needed
drafts              finds the accepted drafts of a chunk, and removes drafts from a chunk
speculation         proposes draft tokens if they are worth computing
predicted           proposes drafts from a text that the client expects as the output
waiting_drafts      keeps the drafts of a draft model until they are planned
stages              shares the work of a pipeline among the steps in flight
states              gives slots for recurrent states to sequences
"""
