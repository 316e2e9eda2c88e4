"""`sluice bench gpu --call NAME --results DIR`: everything about a GPU, in three commands of nine minutes.

For a machine that is lent for minutes, starts bare, has no network, and gives back a few small files. Each command
starts from the files that the last one left in the folder of its results.

parts               the parts of each command, as data
runner              runs the parts of one command: first those that run side by side, then one after another
part_process        one part in a process: its files, its time limit, its outcome
state               records which parts have been run, so that later commands run only what is missing
archives            packs results and Triton's cache into a few files of limited size, and unpacks them
report              all results so far as one page
machine             the part `environment`: the GPU, versions, packages, the precompiled cache
packages            packages that the parts need, and which of them are missing
"""
