"""The grammars that force a model to keep to the syntax of calls.

tool_grammar        the grammar that forces a model to keep to the syntax of calls
argument_rules      the rules of this grammar for a call's arguments
lark                parts of a grammar as text
harmony_grammar     the grammar of gpt-oss's messages
"""
