"""From a request on the wire to a step on the device and back.

loop                the compute loop: receive, plan, launch, apply the results, publish
requests            the request table: messages become sequences, results become messages
step_builder        the `Step` message for one frontend while it is being filled
validation          checks of a Submit that the scheduler does not make
crash_journal       which requests were running when a worker died
load                from a model's name to an engine that is ready
formats             the number formats of a model
status              the Status that frontends and scrapes see
"""
