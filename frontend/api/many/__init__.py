"""Many models behind one frontend, each loaded by the launcher when a request needs it.

launcher_link       the connection to the launcher: what is loaded, and what this frontend's requests need
residents           the table of models, each with its tokenizer and its workers while it is loaded
refusals            why a request is refused, and the field `keep_alive`
loading_comments    what a client sees while its request waits for a model
fields, routes, paths       /models/load and /models/unload
sleep               /sleep, /wake_up and /is_sleeping
"""
