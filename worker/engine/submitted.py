"""Makes a Sequence from a Submit: the plain request, and a record for each feature that the request asks for."""

from math import inf

import msgspec

from shared.messages import Submit
from shared.wire.codec import unpack_u32
from worker.schedule.records.history import History
from worker.schedule.records.host_work import host_work
from worker.schedule.records.shared_prefix import SharedPrefix
from worker.schedule.records.turn import Turn
from worker.schedule.sequence import Key, Sequence


def sequence_of(key: Key, submit: Submit, seed: int, now: float, crashes: int) -> Sequence:
    """Returns the sequence of a request that check_submit() has accepted.

    now: seconds of the loop's clock; crashes: how many workers the request is suspected of having crashed. Raises
    ImportError if the worker lacks the module of a feature.
    """
    prompt = unpack_u32(submit.prompt).tolist()
    deadline = now + submit.deadline_ms / 1e3 if submit.deadline_ms else inf
    sequence = Sequence(
        key,
        prompt + unpack_u32(submit.generated).tolist(),
        len(prompt),
        submit.sampling,
        seed,
        turn=Turn(submit.group, submit.priority, deadline, submit.tenant),
        history=History(now, crashes=crashes, resumed=submit.crashes > 0, original_id=submit.original_id),
        prefix=SharedPrefix(submit.cache_salt),
        pooling=submit.pooling,
        host=host_work(submit.sampling, checked=submit.answer is not None),
    )
    if submit.sampling.logit_bias:  # the arrays of `sequence.adjustment` take a tenth of the memory
        sequence.sampling = msgspec.structs.replace(submit.sampling, logit_bias=())
    if submit.adapter is not None:
        from worker.schedule.records.adapter_use import AdapterUse

        sequence.adapter = AdapterUse(submit.adapter)
    if submit.answer is not None:
        from worker.schedule.records.answer_check import AnswerCheck

        sequence.check = AnswerCheck(unpack_u32(submit.answer).tolist()[: submit.sampling.max_tokens])
    if submit.prediction is not None:
        from worker.schedule.records.prediction import Prediction

        sequence.prediction = Prediction(unpack_u32(submit.prediction).tolist())
    if submit.sampling.chain is not None and submit.sampling.chain.mirostat:
        from worker.schedule.records.mirostat import begin

        begin(sequence)
    if submit.sampling.prompt_logprobs:
        from worker.schedule.records.prompt_scores import PromptScores

        sequence.scores = PromptScores(submit.scored_from)
    return sequence
