"""Reasoning and tool calls in generated text: how a model writes them, and how they are parsed.

marks               the special tokens that a parser must see, each as a stand-in character
formats             the formats that a model uses, read from its chat template; `ParserConfig` for one answer
reasoning_marks     the tokens that end reasoning when its budget is used up
tool_choice         the tools that an answer may or must call
calls/              tool calls in generated text, and their arguments
parameter_kinds     tells from a function's schema which parameters are strings
grammar/            the grammars that force a model to keep to the syntax of calls
parser              turns text into events as it arrives; chooses the parser of each format
harmony             parses gpt-oss's messages
events              what the parser emits: text, reasoning, parts of tool calls
unseparated         parses output whose reasoning stays in the text
continued           parses output that continues earlier text
counting            counts the tokens of reasoning
parsed              collects the events, for responses that are not streamed
"""
