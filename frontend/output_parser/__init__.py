"""Reasoning and tool calls in generated text: how a model writes them, and how they are parsed.

marks               special tokens that a parser must see, as characters
formats             which formats a model uses, read from its chat template; `ParserConfig` for one answer
reasoning_marks     what ends reasoning when its budget is used up
tool_choice         the tools that an answer may or must call
tool_syntax         how each format writes a tool call: a row of data for each
parameter_kinds     which parameters are strings, by a function's schema
tool_prompt         tools as text, for chat templates that know none
tool_grammar        the grammar that forces a model to keep to that syntax
argument_rules      its rules for a call's arguments
lark                parts of a grammar as text
parser              turns text into events as it arrives: tags in text, and the choice between formats
call_parser         finds calls in text
prefix              matches what stands before a call's arguments
harmony             the same for gpt-oss's messages
harmony_grammar     the grammar of those messages
mistral_args        the same, and the grammar, for newer Mistral models
calls               the calls of one output, and their arguments as they arrive
argument_scanners   makes JSON of a call's arguments as they arrive, by the form that the format gives them:
json_stream         they are JSON
tagged_arguments    they stand between tags
literal_arguments   they are literals of Python, or of a language near JSON
state_scanner       the base of the last two
events              what the parser emits: text, reasoning, parts of tool calls
unseparated         parses output whose reasoning stays in the text
continued           parses an output from a place on
counting            counts the tokens of reasoning
parsed              the same events collected, for responses that are not streamed
"""
