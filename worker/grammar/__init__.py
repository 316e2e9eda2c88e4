"""Structured output: makes answers follow a grammar.

compiler            compiles grammars, in threads
pending             holds requests whose grammars are being compiled, or adapters read
matcher             tracks how far one answer has got in its grammar
thinking            counts the tokens that one answer has thought
token_rules         allows and forbids tokens by their ids, and ends reasoning when its budget is used up
"""
