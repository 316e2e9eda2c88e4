"""The compute loop: failed steps are bisected, suspects run alone, and a broken device ends the loop."""

import pytest

from shared import messages as m
from tests.wire.harness import expected
from tests.worker.engine.harness import ME, Bench, submit
from worker.schedule.sequence import Chunk


@pytest.mark.parametrize("culprit", range(6))
def test_only_the_culprit_fails(culprit: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, culprit) and chunk.sequence.output_len == 2 for chunk in chunks):
            raise RuntimeError("unlucky")

    bench = Bench(check)
    bench.say(*(submit(i, [i + 1] * 20) for i in range(3)))
    bench.turn(2)
    bench.say(*(submit(i, [i + 1] * 20) for i in range(3, 6)))
    bench.turn(8)
    outputs, ends = bench.heard()
    for i in range(6):
        wanted = expected([i + 1] * 20, 5)
        assert outputs[i] == (wanted[:2] if i == culprit else wanted)
        assert ends[i].outcome is (m.Outcome.ERROR if i == culprit else m.Outcome.LENGTH)
    assert "unlucky" in ends[culprit].error
    assert bench.scheduler.state.paging.pool.counts().owned == 0


def test_out_of_memory_shrinks_the_step_and_fails_nobody() -> None:
    def check(chunks: list[Chunk]) -> None:
        if sum(chunk.length for chunk in chunks) > 30:
            raise MemoryError("too large")

    bench = Bench(check)
    bench.say(submit(1, [1] * 200), submit(2, [2] * 100), submit(3, [3]))
    bench.turn(40)
    outputs, ends = bench.heard()
    assert outputs == {1: expected([1] * 200, 5), 2: expected([2] * 100, 5), 3: expected([3], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert max(bench.runner.steps) <= 30


def test_tokens_are_counted_as_the_prompts_or_the_answers() -> None:
    bench = Bench()
    bench.say(submit(1, [1] * 9, 5), submit(2, [2] * 40, 3))
    bench.turn(6)
    value = bench.metrics.registry.get_sample_value
    assert [value(f"sluice_{name}_tokens_total") for name in ("prefill", "sampled")] == [49, 8]


def test_suspects_run_alone_until_they_have_made_a_token() -> None:
    steps: list[list[int]] = []
    bench = Bench(lambda chunks: steps.append([chunk.sequence.key[1] for chunk in chunks]))
    bench.say(*(submit(id, [id + 1] * 4, 3, crashes=int(id in (1, 3))) for id in range(4)))
    bench.turn(3)
    assert steps[:3] == [[0, 2], [1], [3]]
    assert sorted(steps[3]) == [0, 1, 2, 3] == sorted(steps[4])
    assert all(bench.heard()[0][id] == expected([id + 1] * 4, 3) for id in range(4))


def test_a_broken_device_fails_the_worker_and_no_request() -> None:
    def check(chunks: list[Chunk]) -> None:
        if broken:
            raise RuntimeError("device lost")

    broken = False
    bench = Bench(check)
    bench.runner.check_device = lambda: check([])  # type: ignore[method-assign]
    bench.say(*(submit(id, [id + 1], 9) for id in range(4)))
    bench.turn(2)
    broken = True
    with pytest.raises(RuntimeError, match="device lost"):
        bench.turn()
    assert not bench.heard()[1]


def test_a_device_that_breaks_in_the_middle_of_a_step_tells_nobody_either() -> None:
    calls = 0

    def check(chunks: list[Chunk]) -> None:
        nonlocal calls
        calls += 1
        if len(chunks) > 1 or calls > 3:
            raise RuntimeError("device lost")

    bench = Bench(check)
    bench.runner.check_device = lambda: check([])  # type: ignore[method-assign]
    bench.say(*(submit(id, [id + 1], 9) for id in range(4)))
    with pytest.raises(RuntimeError, match="device lost"):
        bench.turn()
    assert not bench.heard()[1]


def test_only_an_idle_device_is_asked_to_prove_itself() -> None:
    proofs: list[float] = []
    bench = Bench()
    bench.loop._canary_s = 5.0
    bench.runner.check_device = lambda: proofs.append(bench.now)  # type: ignore[method-assign]
    bench.turn(11)
    assert proofs == [5.0, 10.0]
    bench.say(submit(1, [1], 20))
    bench.turn(20)  # computes until 31
    bench.turn(6)
    assert proofs == [5.0, 10.0, 36.0]
