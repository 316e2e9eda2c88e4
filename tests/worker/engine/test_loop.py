"""The compute loop: failed steps are bisected, suspects run alone, and a broken device ends the loop."""

import pytest

from shared import messages as m
from tests.wire.harness import expected
from tests.worker.engine.harness import ME, Bench, check_only_one_failed, submit
from worker.engine import loop
from worker.scheduler.sequence import Chunk


@pytest.mark.parametrize("culprit", range(6))
def test_failing_step_fails_only_the_culprit(culprit: int) -> None:
    def check(chunks: list[Chunk]) -> None:
        if any(chunk.sequence.key == (ME, culprit) and chunk.sequence.output_len == 2 for chunk in chunks):
            raise RuntimeError("unlucky")

    bench = Bench(check)
    bench.send(*(submit(i, [i + 1] * 20) for i in range(3)))
    bench.iterate(2)
    bench.send(*(submit(i, [i + 1] * 20) for i in range(3, 6)))
    bench.iterate(8)
    check_only_one_failed(bench, culprit)


def test_out_of_memory_shrinks_the_step_and_fails_no_request() -> None:
    def check(chunks: list[Chunk]) -> None:
        if sum(chunk.length for chunk in chunks) > 30:
            raise MemoryError("too large")

    bench = Bench(check)
    bench.send(submit(1, [1] * 200), submit(2, [2] * 100), submit(3, [3]))
    bench.iterate(40)
    outputs, ends = bench.received()
    assert outputs == {1: expected([1] * 200, 5), 2: expected([2] * 100, 5), 3: expected([3], 5)}
    assert {end.outcome for end in ends.values()} == {m.Outcome.LENGTH}
    assert max(bench.runner.steps) <= 30


def test_tokens_are_counted_as_prompt_or_output() -> None:
    bench = Bench()
    bench.send(submit(1, [1] * 9, 5), submit(2, [2] * 40, 3))
    bench.iterate(6)
    value = bench.metrics.registry.get_sample_value
    assert [value(f"sluice_{name}_tokens_total") for name in ("prefill", "sampled")] == [49, 8]


def test_suspects_run_in_their_own_steps_until_they_make_a_token() -> None:
    steps: list[list[int]] = []
    bench = Bench(lambda chunks: steps.append([chunk.sequence.key[1] for chunk in chunks]))
    bench.send(*(submit(id, [id + 1] * 4, 3, crashes=int(id in (1, 3))) for id in range(4)))
    bench.iterate(3)
    assert steps[:3] == [[0, 2], [1], [3]]
    assert sorted(steps[3]) == [0, 1, 2, 3] == sorted(steps[4])
    assert all(bench.received()[0][id] == expected([id + 1] * 4, 3) for id in range(4))


def test_broken_device_ends_the_loop_and_fails_no_request() -> None:
    def check(chunks: list[Chunk]) -> None:
        if broken:
            raise RuntimeError("device lost")

    broken = False
    bench = Bench(check)
    bench.runner.check_device = lambda: check([])  # type: ignore[method-assign]
    bench.send(*(submit(id, [id + 1], 9) for id in range(4)))
    bench.iterate(2)
    broken = True
    with pytest.raises(RuntimeError, match="device lost"):
        bench.iterate()
    assert not bench.received()[1]


def test_device_breaking_during_bisection_fails_no_request() -> None:
    calls = 0

    def check(chunks: list[Chunk]) -> None:
        nonlocal calls
        calls += 1
        if len(chunks) > 1 or calls > 3:
            raise RuntimeError("device lost")

    bench = Bench(check)
    bench.runner.check_device = lambda: check([])  # type: ignore[method-assign]
    bench.send(*(submit(id, [id + 1], 9) for id in range(4)))
    with pytest.raises(RuntimeError, match="device lost"):
        bench.iterate()
    assert not bench.received()[1]


def test_canary_checks_the_device_only_when_idle() -> None:
    checks: list[float] = []
    bench = Bench(canary_s=5.0)
    bench.runner.check_device = lambda: checks.append(bench.now)  # type: ignore[method-assign]
    bench.iterate(11)
    assert checks == [5.0, 10.0]
    bench.send(submit(1, [1], 20))
    bench.iterate(20)  # computes until time 31
    bench.iterate(6)
    assert checks == [5.0, 10.0, 36.0]


def test_freed_memory_goes_back_once_when_nothing_was_computed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    bench = Bench()
    monkeypatch.setattr(loop, "return_memory", lambda: given.append(bench.now))
    bench.iterate(20)
    assert not given
    bench.send(submit(1, [1], 3))
    bench.iterate(3)
    computed = bench.now
    bench.iterate(20)
    assert given == [computed + loop.TRIM_AFTER_S]
