"""Tool calls in generated text, and their arguments.

tool_syntax         how formats write tool calls: a row of data for each format
tool_prompt         writes tools as text, for chat templates that cannot show tools
call_parser         finds calls in text
prefix              matches what stands before a call's arguments
mistral_args        the parser and the grammar for newer Mistral models
calls               the calls of one output, and their arguments as they arrive
argument_scanners   makes JSON of a call's arguments as they arrive, with the scanner of their form:
json_stream         scans arguments that are JSON
tagged_arguments    scans arguments between tags
literal_arguments   scans literals of Python, or of a language near JSON
state_scanner       the base of the last two scanners
"""
