"""Many models in one server. The launcher loads and unloads models as requests need them.

plan                from settings to the table of models, each with the settings of its worker
hub                 fetches models that are on the hub
sizes               how much memory a model will take, read from its checkpoint's files
account             what is loaded, what may be loaded next, and what has to go for it: decisions without processes
manager             carries the decisions out: one worker process for each loaded model
spare               starts a process that becomes the worker of the next model
spare_process       what that process does: imports libraries and waits
control             the socket on which frontends say what they need and learn what is loaded
"""
