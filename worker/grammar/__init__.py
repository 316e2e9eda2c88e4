"""Structured output: answers that must match a grammar.

compiler            compiles grammars, in threads
waiting             requests whose grammars are being compiled
matcher             the state of one answer in its grammar
"""
