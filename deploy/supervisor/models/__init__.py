"""Many models in one server. The launcher loads and unloads models as requests need them.

plan                from settings to the table of models, each with the settings of its worker
hub                 fetches models that are on the hub
sizes               estimates a model's memory from its checkpoint's files
account             decides which model is loaded next, and which models are unloaded for it; knows no processes
manager             carries out the decisions: one worker process for each loaded model
spare               starts a spare process, which becomes the worker of the next model
spare_process       the spare process itself: imports libraries and waits
control             the socket on which frontends say which models they need, and learn which are loaded
"""
