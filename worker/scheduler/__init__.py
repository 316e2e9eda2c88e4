"""Decides which tokens are computed next. Uses plain integers: no tensors, no sockets, no clock (callers pass `now`).

scheduler           the interface for other folders: submit, plan, launched, update, abort
planner             plans the next step: its decodes, prompt chunks and drafts
sequence            the data of a request, of a planned step, and of its results
state               holds all live sequences, waiting or running
queue               orders the waiting sequences
fair_queue          orders tenants fairly
starved_tenants     makes room for a tenant that others keep waiting
admission           decides which requests are accepted at all
policy              the scheduling modes, as small objects
step_time           limits the prompt tokens of a step, from measured step times
row_costs           measures how much longer a step of few rows takes with one more row
recent              the median of the last few measurements
prefix_waits        lets a prompt wait while another one with the same prefix is computed
paging              gives pages from worker/kv_cache to sequences
records/            the records of a sequence besides its tokens: three that every sequence has, and one per feature
features/           the scheduler's part of features that only some models or settings need
"""
