"""Many models behind one frontend. The launcher loads a model when a request needs it.

launcher_link       the connection to the launcher: which models are loaded, and which models requests need
residents           the table of models, each with its tokenizer and its workers while it is loaded
refusals            the errors for models that cannot be used, and the field `keep_alive`
loading_comments    keeps a client's connection alive while its request waits for a model
fields, routes, paths       /models/load and /models/unload
sleep               /sleep, /wake_up and /is_sleeping
"""
