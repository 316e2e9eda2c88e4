"""Outputs that keep to a grammar.

compiler                    texts to grammars, on threads of its own
waiting                     requests whose grammars are being compiled
matcher                     how far one output has come
"""
