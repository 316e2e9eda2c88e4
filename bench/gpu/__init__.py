"""`sluice bench gpu`: correctness and speed of one GPU, in one command.

command             flags and output files
sections            the measured sections and their tasks, as data
driver              starts the measuring process, watches its time, collects its rows
measuring_process   runs tasks; if it dies, earlier results are kept
environment         passed to every measurement: device, sizes, clock, remaining time
shapes              models and sizes
compile_time        seconds that Triton spends compiling
clock               times code on a device
tables              rows as text, Markdown and JSON
checks/             correctness
measure/            measurements, by section
first_hour/         all checks and measurements of a new GPU, as one command that can be repeated
setup/              models, steps and tools that measurements share
offline/            rehearsals and compilation on a fake GPU, without hardware
"""
