"""Thoughts and function calls in an answer's text: how a model marks them, makes them under a grammar, and is read.

style       which format a model has, told from its chat template; what to look for in one answer (`Speech`)
offer       the functions that an answer may or must call
forms       how a call is written in each format
grammar     a grammar that holds a model to that
reader      text to events as it comes; `arguments` follows a call's JSON
events      what the reader gives: text, reasoning, parts of calls
said        the same folded, for answers that go out whole
"""
