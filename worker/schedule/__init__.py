"""Which tokens are computed next. Plain counts: no tensors, no sockets, no clock (the caller passes `now`).

scheduler                   all that others call: submit, plan, advance, settle, abort
sequence, plan              the vocabulary: a request as counts; a step, and what came of it
state, queue, turns         who is there; who waits; whose turn it is
admission                   who is taken in at all
planning, policy, pace      plan(): the next step; its modes; how long it may last
paging                      pages for sequences, out of memory/
drafting, drafter           guessed tokens, computed with the one before
settling                    settle(): what a step's ids mean
"""
