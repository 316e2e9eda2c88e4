"""Speed, measured from outside: `sluice bench`. Every report names its command.

quick               `make bench`: the server beside a plain transformers loop (generate)
measure, report, plots      workloads in several modes, with a report in HTML
client/             the load client, and what it measures
peers/              the same load on other servers
gpu/                everything about one GPU
simulate/           the scheduler in virtual time: `sluice simulate`
frontend, scripted, floors, text    what one token costs a frontend, and the floor for that
step                what a step costs the worker beside the model
native, stand_in    the CPU kernels beside plain torch; AMX products without AMX
drafts, grammar, quantization       what these features cost or gain
checkpoints         random checkpoints of real shapes
"""
