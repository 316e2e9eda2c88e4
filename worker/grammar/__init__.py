"""Structured output: keeps answers to a grammar.

compiler            compiles grammars, in threads
pending             requests whose grammars are being compiled
matcher             the state of one answer in its grammar
"""
