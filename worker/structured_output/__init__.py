"""Structured output: makes answers follow a grammar.

compiler            compiles grammars, in threads
pending             holds requests whose grammars are being compiled, or whose adapters are being read
matcher             tracks the state of one answer in its grammar
thinking            counts the reasoning tokens of one answer
token_rules         allows and forbids tokens by their ids, and ends reasoning when its budget is used up
"""
