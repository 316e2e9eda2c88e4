"""The Step message of one frontend."""

import pytest

from shared import messages as m
from shared.wire import unpack_u32
from worker.engine import step_message
from worker.engine.step_message import StepBuilder


def test_build_concatenates_tokens_with_their_offsets() -> None:
    builder = StepBuilder()
    builder.add(7, 0, [11, 12])
    builder.add(9, 3, [13])
    builder.admitted.append(m.Admitted(7, 1))
    builder.unknown.append(4)
    step = builder.build()
    assert [unpack_u32(column).tolist() for column in (step.ids, step.starts, step.counts)] == [[7, 9], [0, 3], [2, 1]]
    assert unpack_u32(step.tokens).tolist() == [11, 12, 13]
    assert step.admitted == (m.Admitted(7, 1),) and step.unknown == (4,) and not step.ends


def scored(id: int, top: int) -> m.Logprobs:
    return m.Logprobs(id, 0, bytes(4), top, bytes(4 * top), bytes(4 * top))


def test_log_probabilities_that_are_too_long_for_one_message_come_with_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = StepBuilder()
    for id, top in ((1, 10), (2, 10), (3, 0), (4, 90), (5, 5)):
        builder.add(id, 0, [id, id])
        if top:
            builder.logprobs.append(scored(id, top))
    builder.logprobs.append(scored(1, 1))
    builder.ends.append(m.End(1, m.Outcome.EOS, 2))
    builder.admitted.append(m.Admitted(3, 1))
    assert builder.parts() == [builder]
    monkeypatch.setattr(step_message, "MAX_LOGPROB_BYTES", 200)
    steps = [part.build() for part in builder.parts()]
    assert [unpack_u32(step.ids).tolist() for step in steps] == [[], [1, 2], [4], [5], [3]]
    assert [[one.id for one in step.logprobs] for step in steps] == [[], [1, 1, 2], [4], [5], []]
    assert [unpack_u32(step.tokens).tolist() for step in steps] == [[], [1, 1, 2, 2], [4, 4], [5, 5], [3, 3]]
    assert steps[0].admitted == tuple(builder.admitted) and steps[-1].ends == tuple(builder.ends)
    assert not any(step.ends for step in steps[:-1])
