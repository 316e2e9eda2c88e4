"""Structured output: makes answers follow a grammar.

compiler            compiles grammars, in threads
pending             holds requests whose grammars are being compiled
matcher             tracks how far one answer has got in its grammar
"""
