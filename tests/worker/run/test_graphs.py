"""Captured decodes with a fake capture, over tiny models on the CPU: the same text, and every failure is logged."""

import logging
from collections.abc import Callable

import pytest
import torch

from shared import messages as m
from shared.codec import pack_u32
from tests.checkpoints import Checkpoints
from tests.worker.run.harness import (
    OTHERS,
    PLAIN,
    RunnerBench,
    batch_invariant_decoder,
    scores,
    traffic,
)
from worker.kv_cache import window
from worker.model.decoder import Decoder
from worker.run.graph_capture import EagerGraph
from worker.run.graphs import DecodeGraphs, batch_sizes


class Counted(EagerGraph):
    """An EagerGraph that counts captures and replays."""

    def __init__(self, body: Callable[[], object], counts: dict[str, int]) -> None:
        def replay() -> None:
            counts["replays"] += 1
            body()

        counts["captures"] += 1
        super().__init__(replay)


@pytest.fixture(autouse=True)
def return_pages_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernels read no key before the first visible one; without this, short sequences return no page."""
    monkeypatch.setattr(window, "KEY_BLOCK", 1)


@pytest.fixture
def decoder(checkpoints: Checkpoints) -> Decoder:
    return batch_invariant_decoder(checkpoints("llama"), torch.float32)


def capturing(decoder: Decoder, *, overlap: bool = False) -> tuple[RunnerBench, DecodeGraphs, dict[str, int]]:
    bench = RunnerBench(decoder, overlap=overlap, graphs=True)
    graphs, counts = bench.runner._graphs, {"captures": 0, "replays": 0}  # type: ignore[attr-defined]
    graphs._capture = lambda body: Counted(body, counts)
    return bench, graphs, counts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("samplings", [PLAIN * 2, PLAIN + OTHERS + PLAIN], ids=["plain", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_replayed_decodes_change_no_bit(
    family: str, samplings: list[m.Sampling], overlap: bool, checkpoints: Checkpoints
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), torch.float32)
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=overlap)
    for one in (plain, bench):
        traffic(one, samplings)
    assert graphs.on and counts["replays"] > 30 and counts["captures"] == len(graphs._decodes)
    assert bench.received()[0] == plain.received()[0] and len(bench.received()[1]) == len(samplings)
    assert family != "gemma3" or len(bench.runner._cache.groups) == 2
    assert scores(bench) == scores(plain)
    assert bench.max_in_flight == overlap


def test_replayed_decodes_in_bfloat16_change_no_bit(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.bfloat16)
    plain, (bench, _, _) = RunnerBench(decoder), capturing(decoder, overlap=True)
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0]


def test_batches_are_padded_to_few_sizes(decoder: Decoder) -> None:
    bench, graphs, _ = capturing(decoder)
    bench.send(*(m.Submit(i, pack_u32([i + 1] * 3), m.Sampling(3 + i, seed=i, ignore_eos=True)) for i in range(20)))
    bench.drain()
    assert {batch for batch, _ in graphs._decodes} == {1, 2, 4, 8, 16, 24}
    assert batch_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64] and batch_sizes(3) == [1, 2, 3] and batch_sizes(1) == [1]
    assert batch_sizes(600)[-4:] == [256, 384, 512, 600]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def capture_that_fails(graphs: DecodeGraphs, failing: set[int]) -> Callable[..., EagerGraph]:
    """Returns a capture whose attempts with these numbers fail; the self-test's attempt has number 0."""
    capture, attempts = graphs._capture, iter(range(1 << 20))

    def attempt(body: Callable[[], object]) -> EagerGraph:
        if next(attempts) in failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(body)  # type: ignore[return-value]

    return attempt


def test_self_test_without_a_capture_turns_graphs_off(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    plain, (bench, graphs, _) = RunnerBench(decoder), capturing(decoder, overlap=True)
    graphs._capture = capture_that_fails(graphs, {0})
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and not graphs.on
    (said,) = warnings(caplog)
    assert "without CUDA graphs" in said and "not permitted" in said


def test_capture_that_fails_once_is_repeated(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    plain, (bench, graphs, _) = RunnerBench(decoder), capturing(decoder, overlap=True)
    graphs._capture = capture_that_fails(graphs, {1})
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and graphs.on
    assert all(decode.graph is not None for decode in graphs._decodes.values())
    (said,) = warnings(caplog)
    assert "tried once more" in said and "not permitted" in said


def test_capture_that_fails_twice_gives_up_for_its_shape_only(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=True)
    graphs._capture = capture_that_fails(graphs, {1, 2})
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and graphs.on and counts["replays"] > 10
    without = [decode for decode in graphs._decodes.values() if decode.graph is None]
    assert len(without) == 1 and not without[0].captures_left
    assert len(warnings(caplog)) == 2 and "without one" in warnings(caplog)[1]


@pytest.mark.parametrize("wrong", ["nothing", "stale", "logits"])
def test_self_test_that_differs_turns_graphs_off(
    wrong: str, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=True)

    def replays(body: Callable[[], object]) -> EagerGraph:
        if wrong == "nothing":
            return EagerGraph(lambda: None)
        if wrong == "logits":
            return EagerGraph(lambda: body().add_(1e-3))  # type: ignore[attr-defined]
        result, ids = body().clone(), graphs._ids.clone()  # type: ignore[attr-defined]

        def again() -> None:
            """With the inputs that it was recorded with."""
            body().copy_(result)  # type: ignore[attr-defined]
            graphs._ids.copy_(ids)

        return EagerGraph(again)

    graphs._capture = replays
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert not graphs.on and not counts["replays"]
    assert bench.received()[0] == plain.received()[0]
    (said,) = warnings(caplog)
    assert "a replay samples other ids" in said or "a replay computes other logits" in said


def test_failing_replay_is_retried_without_graphs(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=True)
    record = graphs._capture

    def breaks(body: Callable[[], object]) -> EagerGraph:
        def replay() -> None:
            if counts["replays"] == 9:
                raise RuntimeError("unlucky")
            inner.replay()

        inner = record(body)
        return EagerGraph(replay)

    graphs._capture = breaks
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and counts["replays"] == 9
    assert {end.outcome for end in bench.received()[1].values()} <= {m.Outcome.EOS, m.Outcome.STOP, m.Outcome.LENGTH}
    assert any("unlucky" in said for said in warnings(caplog)) and not graphs.on


def test_replay_counts_its_layers_as_progress(decoder: Decoder) -> None:
    bench, graphs, counts = capturing(decoder)
    told: list[int] = []
    count = graphs._count_replayed
    graphs._count_replayed = lambda: (told.append(bench.runner.layers_started), count())[1]  # type: ignore[attr-defined]
    bench.send(m.Submit(1, pack_u32([5]), m.Sampling(9, ignore_eos=True)))
    bench.drain()
    assert len(told) == counts["replays"] - 1, "all but the one of the comparison"
    assert told == sorted(set(told)) and bench.runner.layers_started >= told[-1] + len(decoder.weights.layers)  # type: ignore[attr-defined]


def test_self_test_writes_to_the_scratch_page_only(decoder: Decoder) -> None:
    """The comparison writes to the scratch page only."""
    bench, graphs, _ = capturing(decoder)
    cache = bench.runner._cache  # type: ignore[attr-defined]
    cache.k[0][:, 1:], cache.v[0][:, 1:] = 7.0, 7.0
    with torch.inference_mode():
        graphs._self_test()
    assert graphs.on and (cache.k[0][:, 1:] == 7).all() and (cache.v[0][:, 1:] == 7).all()
