"""Steps with a fake graph capture, over tiny models on the CPU: the text stays the same, and failures are logged."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from shared import messages as m
from shared.wire import pack_u32
from tests.checkpoints import Checkpoints
from tests.worker.model_runner import harness
from tests.worker.model_runner.harness import (
    OTHERS,
    PLAIN,
    RunnerBench,
    batch_invariant_decoder,
    scores,
    traffic,
)
from worker.kv_cache import pages as pages_module
from worker.model_runner import cuda_graphs
from worker.model_runner.cuda_graph_capture import Captured, EagerGraph, Graph
from worker.model_runner.cuda_graphs import StepGraphs
from worker.model_runner.step import InFlightStep
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Plan, Row


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
    """Sets the block in which kernels read keys to one position, so that short sequences return pages, too."""
    monkeypatch.setattr(pages_module, "KEY_BLOCK", 1)


@pytest.fixture
def decoder(checkpoints: Checkpoints) -> Decoder:
    return batch_invariant_decoder(checkpoints("llama"), torch.float32)


def capturing(decoder: Decoder, *, overlap: bool = False) -> tuple[RunnerBench, StepGraphs, dict[str, int]]:
    bench = RunnerBench(decoder, overlap=overlap, graphs=True)
    graphs, counts = bench.runner._graphs, {"captures": 0, "replays": 0}  # type: ignore[attr-defined]
    graphs._capture = lambda body: Counted(body, counts)
    return bench, graphs, counts


def captured(graphs: StepGraphs) -> list[Captured]:
    return [*(step.captured for step in graphs._forwards.values()), *graphs._sampling._samplings.values()]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_replayed_steps_of_the_decoders_own_loop_change_no_bit(
    family: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the loop over the layers is Python's; without this test, C runs it, which gathers rows in its own way.

    Among the shapes are some with as many rows of logits as tokens.
    """
    monkeypatch.setattr(harness, "fastest_decoder", lambda decoder, cache: decoder)
    decoder = batch_invariant_decoder(checkpoints(family), torch.float32)
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder)
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert graphs.on and counts["replays"] > 30
    assert any(shape.mixed and shape.rows == shape.tokens for shape in graphs._forwards)
    assert bench.received()[0] == plain.received()[0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("samplings", [PLAIN * 2, PLAIN + OTHERS + PLAIN], ids=["plain", "others"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_replayed_steps_change_no_bit(
    family: str, samplings: list[m.Sampling], overlap: bool, checkpoints: Checkpoints
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), torch.float32)
    plain, (bench, graphs, counts) = RunnerBench(decoder, overlap=overlap), capturing(decoder, overlap=overlap)
    for one in (plain, bench):
        traffic(one, samplings)
    assert graphs.on and counts["replays"] > 60 and counts["captures"] == len(captured(graphs))
    assert {shape.mixed for shape, step in graphs._forwards.items() if step.captured.graph} == {False, True}
    assert bench.received()[0] == plain.received()[0] and len(bench.received()[1]) == len(samplings)
    assert family != "gemma3" or len(bench.runner._cache.groups) == 2  # type: ignore[attr-defined]
    assert scores(bench) == scores(plain)
    assert bench.max_in_flight == plain.max_in_flight == overlap


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Uses one thread, because all sequences of the self-test write the scratch slot. The C library, which never runs
    in a real graph, reads a written state again within a step (StateSlots), so several threads would disturb each
    other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3_5-moe", "lfm2"])
def test_replayed_steps_of_recurrent_layers_and_experts_change_no_bit(family: str, checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), torch.float32)
    plain, (bench, graphs, _) = RunnerBench(decoder), capturing(decoder)
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert graphs.on and any(shape.mixed for shape in graphs._forwards)
    assert bench.received()[0] == plain.received()[0]


def test_replayed_steps_in_bfloat16_change_no_bit(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.bfloat16)
    plain, (bench, graphs, _) = RunnerBench(decoder), capturing(decoder, overlap=True)
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert graphs.on and bench.received()[0] == plain.received()[0]


def test_only_pooling_and_prompt_logprobs_run_without_a_graph(decoder: Decoder) -> None:
    bench, graphs, _ = capturing(decoder)
    launch, launched = graphs.launch, Counter[str]()

    def counting(plan: Plan, rows: list[Row], before: InFlightStep | None) -> object:
        result = launch(plan, rows, before)
        prompts = any(chunk.sequence.sampling.prompt_logprobs and chunk.start < 80 for chunk in plan.chunks)
        launched["eager" if result is None else "replayed", "scored" if prompts else "other"] += 1
        return result

    graphs.launch = counting  # type: ignore[method-assign]
    traffic(bench, PLAIN + OTHERS)
    assert launched["replayed", "other"] > 20 and launched["eager", "scored"] and not launched["eager", "other"]


def test_greedy_rows_are_sampled_by_a_graph_of_their_own(decoder: Decoder) -> None:
    bench, graphs, _ = capturing(decoder)
    bench.send(m.Submit(1, pack_u32([5] * 3), m.Sampling(5, temperature=0.0, ignore_eos=True)))
    bench.drain()
    assert (1, True) in graphs._sampling._samplings and (1, False) not in graphs._sampling._samplings


def test_everything_is_captured_before_serving(decoder: Decoder) -> None:
    bench, graphs, counts = capturing(decoder)
    moved: list[int] = []
    with torch.inference_mode():
        graphs.capture_all(lambda: 1 << 40, lambda: moved.append(1))
    before = counts["captures"]
    assert before == len(moved) == len(captured(graphs)) > 20
    traffic(bench, PLAIN + OTHERS)
    assert counts["captures"] == before


def test_capture_before_serving_stops_when_memory_is_short(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder)
    free = iter([1 << 40] * 6)
    with torch.inference_mode():
        graphs.capture_all(lambda: next(free, 0), lambda: None)
    (said,) = warnings(caplog)
    assert "only 5 CUDA graphs" in said and "0 MiB of memory are free" in said
    assert graphs.on and sum(one.graph is not None for one in captured(graphs)) == counts["captures"] < 10
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and len(warnings(caplog)) == 1


def test_batches_are_padded_to_few_sizes(decoder: Decoder) -> None:
    bench, graphs, _ = capturing(decoder)
    bench.send(*(m.Submit(i, pack_u32([i + 1] * 3), m.Sampling(3 + i, seed=i, ignore_eos=True)) for i in range(20)))
    bench.drain()
    assert {shape.sequences for shape in graphs._forwards if not shape.mixed} == {1, 2, 4, 8, 16, 24}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the graphs warned of; a thread that another test left behind may log, too."""
    mine = (record for record in caplog.records if record.name == cuda_graphs.log.name)
    return [record.message for record in mine if record.levelno == logging.WARNING]


SELF_TEST = 4  # number of captures: forward and sampling, of decodes and of a mixed step


def capture_that_fails(graphs: StepGraphs, failing: set[int]) -> Callable[..., EagerGraph]:
    """Returns a capture whose attempts with these numbers fail; the self-test's attempts come first."""
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
    graphs._capture = capture_that_fails(graphs, {SELF_TEST})
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and graphs.on
    assert all(one.graph is not None for one in captured(graphs))
    (said,) = warnings(caplog)
    assert "tried once more" in said and "not permitted" in said


def test_capture_that_fails_twice_gives_up_for_its_shape_only(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=True)
    capture, failed = graphs._capture, []

    def failing(body: Callable[[], object]) -> Graph:
        shape = getattr(getattr(body, "__self__", None), "shape", None)
        if shape is not None and shape.sequences == 2:
            failed.append(shape)
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(body)

    graphs._capture = failing
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert bench.received()[0] == plain.received()[0] and graphs.on and counts["replays"] > 10
    assert len(failed) == 2 and [one for one in captured(graphs) if one.graph is None] == [
        graphs._forwards[failed[0]].captured
    ]
    assert len(warnings(caplog)) == 2 and "runs without a graph" in warnings(caplog)[1]


@pytest.mark.parametrize("wrong", ["nothing", "stale", "logits"])
@pytest.mark.parametrize("mixed", [False, True])
def test_self_test_that_differs_turns_graphs_off(
    wrong: str, mixed: bool, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    plain, (bench, graphs, counts) = RunnerBench(decoder), capturing(decoder, overlap=True)
    right, logits = graphs._capture, graphs._memory.logits

    def replays(body: Callable[[], object]) -> Graph:
        shape = getattr(getattr(body, "__self__", None), "shape", None)
        if shape is None or shape.mixed != mixed:
            return right(body)
        if wrong == "nothing":
            return EagerGraph(lambda: None)
        if wrong == "logits":
            return EagerGraph(lambda: (body(), logits.add_(1e-3)))
        body()
        first = logits.clone()
        return EagerGraph(lambda: logits.copy_(first))

    graphs._capture = replays
    for one in (plain, bench):
        traffic(one, PLAIN)
    assert not graphs.on and counts["replays"] <= 3, "those of the self-test"
    assert bench.received()[0] == plain.received()[0]
    (said,) = warnings(caplog)
    assert "computes other logits" in said


def test_self_test_notices_that_padding_changes_bits(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    bench, graphs, counts = capturing(decoder)
    forward = graphs._forward
    # a step with max_pages runs without a graph
    graphs._forward = lambda inputs: forward(inputs) + (0 if inputs.max_pages else 1e-3)
    traffic(bench, PLAIN)
    (said,) = warnings(caplog)
    assert not graphs.on and not counts["replays"] and "padding" in said


def test_self_test_with_other_ids_turns_graphs_off(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    bench, graphs, _ = capturing(decoder)
    right, ids = graphs._capture, graphs._memory.ids

    def replays(body: Callable[[], object]) -> Graph:
        is_forward = hasattr(body, "__self__")
        return right(body) if is_forward else EagerGraph(lambda: (body(), ids[:1].add_(1)))

    graphs._capture = replays
    traffic(bench, PLAIN)
    (said,) = warnings(caplog)
    assert not graphs.on and "gives other ids" in said


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
    bench, graphs, _ = capturing(decoder)
    told: list[int] = []
    count = graphs._count_replayed
    graphs._count_replayed = lambda: (told.append(bench.runner.layers_started), count())[1]  # type: ignore[attr-defined]
    bench.send(m.Submit(1, pack_u32([5]), m.Sampling(9, ignore_eos=True)))
    bench.drain()
    assert len(told) == 8, "all but the first one, which runs before the capture"
    assert told == sorted(set(told)) and bench.runner.layers_started >= told[-1] + len(decoder.weights.layers)  # type: ignore[attr-defined]


def test_self_test_writes_to_the_scratch_page_only(decoder: Decoder) -> None:
    """The comparison leaves all other pages unchanged."""
    bench, graphs, _ = capturing(decoder)
    cache = bench.runner._cache  # type: ignore[attr-defined]
    cache.k[0][:, 1:], cache.v[0][:, 1:] = 7.0, 7.0
    with torch.inference_mode():
        graphs._self_test()
    assert graphs.on and (cache.k[0][:, 1:] == 7).all() and (cache.v[0][:, 1:] == 7).all()
