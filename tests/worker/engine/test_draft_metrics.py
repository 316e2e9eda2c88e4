"""Metrics of drafts by their position, from a scheduler with drafts."""

from prometheus_client import CollectorRegistry

from tests.worker.scheduler.test_repeated_rows import recurrent, submit
from worker.engine.metrics import DraftCollector


def test_drafts_are_counted_by_their_position() -> None:
    one = recurrent(max_draft_tokens=4)
    assert one.scheduler.speculation is not None
    registry = CollectorRegistry()
    registry.register(DraftCollector("x_", one.scheduler.speculation))

    def counts(what: str) -> list[float | None]:
        name = f"x_spec_decode_num_{what}_tokens_per_pos_total"
        return [registry.get_sample_value(name, {"position": str(at)}) for at in range(5)]

    assert counts("draft") == counts("accepted") == [None] * 5
    submit(one, [1, 2, 3], wrong={6}, max_tokens=9)
    one.step()
    one.step()
    assert counts("draft") == [1, 1, 1, 1, None] and counts("accepted") == [1, 1, 0, 0, None]
    one.finish(20)
    status = one.scheduler.status
    assert sum(map(float, filter(None, counts("draft")))) == status.draft_tokens
    assert sum(map(float, filter(None, counts("accepted")))) == status.accepted_tokens
