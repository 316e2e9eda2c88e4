"""`sluice bench gpu`: correctness and speed of one GPU, in one command.

command             flags and output files
sections            what is measured, as data
driver              starts the measuring process, watches its time, collects its rows
measuring_process   runs tasks, and may die without losing what was measured before
environment         passed to every measurement: device, sizes, clock, remaining time
shapes              models and sizes
compile_time        seconds that Triton spends compiling
clock               times code on a device
tables              rows as text, Markdown and JSON
checks/             correctness
measure/            measurements, by section
first_hour/         everything about a GPU that is met for the first time, as one command that can be repeated
setup/              models, steps and tools that measurements share
offline/            a GPU that is not there: rehearsals and compilation without hardware
"""
