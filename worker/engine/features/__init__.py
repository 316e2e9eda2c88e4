"""What only some engines have, loaded beside the model.

drafters            finds the model that --speculative-config names, and gives it to an engine
"""
