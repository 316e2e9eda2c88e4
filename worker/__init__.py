"""A worker: one process for one device, which schedules, computes and samples. In the order of a request:

    __main__                    one process: binds, loads, serves, drains
    link, authenticator         the sockets, on an I/O thread; who may connect
    loop                        the compute loop: receive, plan, launch, settle, publish
    desk, validation, frame     messages to scheduler calls and back; is a request sound; a message being filled
    schedule/                   which tokens the next step computes, in plain counts
    memory/                     K/V pages: whose they are, which are found again, how many there are
    run/                        a step: plan to tensors, forward, sampling, tokens
    model/                      the decoder, and how a checkpoint becomes one
    kernels/                    what it computes with: plain PyTorch, Triton, C
    grammar/                    what a constrained output may continue with

Beside the way of a request:

    load, device, openmp        from a model's name to an engine that is ready; which device; how threads wait
    ledger                      who was in a step that killed a worker
    stats, metrics              what Status and /metrics say
    simulate/                   the same scheduler in virtual time
"""
