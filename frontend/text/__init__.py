"""Text and token ids.

tokenizer           text to ids, in threads; what each id stands for
tokenizer_files     the tokenizer files of a checkpoint
spellings           finds and marks the spellings of added tokens in texts
aliased_engine      a copy of a tokenizer, for texts whose spellings of added tokens are text
token_length        how many characters of a text one token can stand for
chat_template       renders a chat as prompt text
detokenizer         ids to text as they arrive, without ever cutting a character
picture_marks       what stands for a picture in a text, from the request to the chat template
picture_format      what a checkpoint says about pictures: their sizes, and how a prompt shows them
stop_strings        finds stop strings across the pieces of a stream
grammar_builder     structured-output requests as the text of a grammar; the worker compiles it (worker/grammar)
grammar_check       whether a grammar is valid, found out in child processes
fill_in_middle      prompts with a text before the answer and a text after it
structural_tag      free text with tagged parts that keep to schemas, as the text of a grammar
closed_schema       JSON schemas whose objects take no unnamed properties
"""
