"""Which tokens are computed next. Plain integers: no tensors, no sockets, no clock (the caller passes `now`).

scheduler           what others call: submit, plan, launched, update, abort
sequence            a request as counts; a step's plan, and what the step did to a sequence
state               all live sequences, waiting or running
queue, fair_queue   the waiting sequences; fair order between tenants
admission           which requests are accepted at all
policy              the scheduling modes, as small objects
step_time           how many prompt tokens a step may have, from measured step times
paging              pages for sequences, from worker/kv_cache
speculation         draft tokens, and how many are worth computing
"""
