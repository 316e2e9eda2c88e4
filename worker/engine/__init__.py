"""Takes requests from the wire, has steps computed on the device, and sends the results back.

loop                the compute loop: receive, plan, launch, apply the results, publish
isolation           divides steps that fail or that may crash the worker
requests            the request table: messages become sequences, results become messages
submitted           makes a sequence of a Submit
request_record      what is kept of an admitted request
backlog             estimates when a full queue has room again
step_builder        collects the contents of the `Step` message for one frontend
validation          checks the values of a Submit that the scheduler does not check
crash_journal       records which requests were running when a worker died
load                loads an engine by the name of its model
features/           what only some engines have, loaded beside the model
load_model          loads the model alone: what its files say, and its weights
load_weights        loads the weights
formats             chooses the number formats of a model
fingerprint         what decides the bits of this worker, as a hash
status              builds the Status that frontends and scrapes see
"""
