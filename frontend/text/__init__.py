"""Text and token ids.

tokenizer           encodes text as ids, in threads, and gives the text of each id
tokenizer_files     the tokenizer files of a checkpoint
spellings           finds and marks the spellings of added tokens in texts
aliased_engine      a copy of a tokenizer that encodes a spelled-out added token as plain text
token_length        how many characters of a text one token can stand for
chat_template       renders a chat as prompt text
detokenizer         turns ids into text as they arrive, without ever cutting a character
picture_marks       the marks that stand for pictures in a text, from the request to the chat template
picture_format      reads from a checkpoint how pictures are resized, and how a prompt shows them
stop_strings        finds stop strings across the pieces of a stream
grammar_builder     turns a structured-output request into the text of a grammar, for worker/grammar to compile
grammar_check       checks in child processes whether a grammar is valid
fill_in_middle      prompts that ask for the text between a given prefix and suffix
structural_tag      builds a grammar of free text with tagged parts that follow schemas
"""
