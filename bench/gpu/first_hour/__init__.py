"""`sluice bench gpu --first-hour OUT`: everything worth knowing about a GPU that is met for the first time, in order.

parts               the parts of a run, as data: cheap parts that can fail come first
runner              runs the parts that are missing, each in a process of its own, within the time given
part_process        runs one part in a process: its files, its time limit, its outcome
state               which parts have been run, in a file, so that the command can be repeated
report              all results so far as one page
machine             the part `environment`: the GPU, versions, packages, the precompiled cache
packages            packages that the parts need, and which of them are missing
"""
