"""Which tokens are computed next. Plain integers: no tensors, no sockets, no clock (the caller passes `now`).

scheduler           what others call: submit, plan, advance, settle, abort
sequence, plan      a request as counts; one step, and what it did
state               all live sequences, waiting or running
queue, fair_queue   the waiting sequences; fair order between tenants
admission           which requests are accepted at all
planning            plan(): the next step
policy              the scheduling modes, as small objects
step_time           how many prompt tokens a step may have, from measured step times
paging              pages for sequences, from kv_cache/
ngram, speculation  drafts of the next tokens, and how many are worth computing
results             settle(): applies the ids that a step sampled
"""
