"""Takes requests from the wire, has steps computed on the device, and sends the results back.

loop                the compute loop: receive, plan, launch, apply the results, publish
isolation           splits steps that failed, or that may crash the worker
requests            the request table: messages become sequences, results become messages
submitted           makes a Sequence from a Submit
request_record      the record of an admitted request, from which output can be sent again
backlog             estimates when a full queue has room again
step_builder        collects the contents of the `Step` message for one frontend
validation          checks the values of a Submit that the scheduler does not check
crash_journal       records which requests were running when a worker died
load                loads an engine by the name of its model
features/           parts that only some engines have: draft models
load_model          loads the model alone: its config files and its weights
load_weights        loads the weights
formats             chooses the number formats of a model
fingerprint         hashes everything that decides the bits that this worker computes
status              builds the Status that frontends and scrapes see
"""
