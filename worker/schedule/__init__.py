"""Decides which tokens are computed next. Uses plain integers: no tensors, no sockets, no clock (callers pass `now`).

scheduler           the interface for other folders: submit, plan, launched, update, abort
planner             decides what the next step has
sequence            the data of a request, of a planned step, and of its results
token_counts        counts the tokens of a sequence, for penalties
state               holds all live sequences, waiting or running
queue               orders the waiting sequences
fair_queue          orders tenants fairly
admission           decides which requests are accepted at all
policy              the scheduling modes, as small objects
step_time           limits the prompt tokens of a step, from measured step times
paging              gives pages from worker/kv_cache to sequences
states              gives slots for recurrent states to sequences
speculation         proposes draft tokens if they are worth computing
"""
