"""The Step message of one frontend."""

from shared import messages as m
from shared.wire.codec import unpack_u32
from worker.engine.step_builder import StepBuilder


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
