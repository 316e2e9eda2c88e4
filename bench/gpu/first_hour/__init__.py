"""`sluice bench gpu --first-hour OUT`: all checks and measurements of a new GPU, in order.

parts               the parts of a run, as data: cheap parts that can fail come first
runner              runs the parts that have no result yet, each in its own process, within the given time
part_process        runs one part in a process: its files, its time limit, its outcome
state               records in a file which parts have been run, so that the command can be repeated
report              all results so far as one page
machine             the part `environment`: the GPU, versions, packages, the precompiled cache
packages            packages that the parts need, and which of them are missing
"""
