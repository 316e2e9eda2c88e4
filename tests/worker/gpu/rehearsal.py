"""Runs a worker on a fake GPU from loading to serving (load, warm up, record, serve), and lists compiled kernels.

`python -m tests.worker.gpu.rehearsal [--compile] [MODEL ...]` prints a line for each model and each way to serve it.
The rehearsal needs a process of its own, because the tests' process has Triton in interpreter mode.
"""

import gc
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench.gpu.offline.checkpoint import checkpoint
from bench.gpu.offline.compiling import compile_all
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.launches import Compilation
from bench.gpu.offline.machine import Machine
from bench.gpu.offline.rehearsals import DRAFTERS, WAYS, few_experts, started
from bench.gpu.shapes import CONFIGS
from bench.micro.step import EncodingServer
from frontend.structured_output import grammar as build
from shared.config.settings import ModelConfig
from shared.lora import read_files
from shared.messages import Adapter, End, Outcome, Sampling, Step, Submit
from shared.prefix_identity import first_line
from shared.wire import pack_u32
from tests.adapters import draw_adapter
from worker.engine.build import Engine
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable
from worker.lora.store import AdapterStore
from worker.model_runner.cuda_graph_inputs import FREE_PADDING
from worker.model_runner.runner import Runner
from worker.scheduler.sequence import Plan
from worker.spec_decode.model_drafter import NeuralDrafter

LONGEST = 4096
ME = b"frontend"
SAMPLINGS = (
    Sampling(8, temperature=0.0), Sampling(7, seed=1), Sampling(6, temperature=0.7, top_p=0.9, seed=2),
    Sampling(6, top_k=40, min_p=0.05, seed=3), Sampling(5, repetition_penalty=1.1, frequency_penalty=0.5, seed=4),
    Sampling(5, temperature=0.0, logit_bias=((3, -1.0), (0, 5.0)), min_tokens=3), Sampling(4, logprobs=5, seed=5),
    Sampling(4, temperature=0.0, logprobs=0, prompt_logprobs=True), Sampling(6, grammar=build.regex("!{1,99}", "x")),
)  # fmt: skip


class Ends(EncodingServer):
    """A link that records how each sequence ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[End] = []
        self.ids: Counter[int] = Counter()

    def publish(self, topic: bytes, step: Step) -> None:
        super().publish(topic, step)
        assert not step.rejected, step.rejected
        self.ended += step.ends
        self.ids.update(memoryview(step.tokens).cast("I"))


class Here(ThreadPoolExecutor):
    """Runs what is submitted at once, in the calling thread: other threads have no fake GPU."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **how: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(fn(*args, **how))
        return done


class Served:
    """An engine with its compute loop; the caller runs each iteration."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        """folder: of the model"""
        self.engine, self.link, self._next = engine, Ends(), 0
        assert engine.weights is not None
        settings = ModelConfig(model=str(folder), allow_runtime_lora=str(folder))
        adapters = AdapterStore(folder, engine.spec, engine.weights, settings, most=8, max_rank=64)
        adapters._threads = Here()
        stats, metrics = Stats(), Metrics()
        vocab = engine.limits.vocab_size
        self._request_table = RequestTable(
            engine.scheduler,
            stats,
            metrics,
            vocab_size=vocab,
            seeds=random.Random(0),
            compiler=engine.compiler,
            adapters=adapters,
        )
        self._loop = Loop(engine.scheduler, engine.runner, self._request_table, self.link, stats, metrics)  # type: ignore[arg-type]

    def say(self, length: int, sampling: Sampling, adapter: Adapter | None = None) -> None:
        prompt = pack_u32([7 + self._next % 50] * length)  # prompts differ, so that few are in the prefix cache
        salt = first_line(adapter) if adapter is not None else ""
        self.link.inbox.append((ME, Submit(self._next, prompt, sampling, cache_salt=salt, adapter=adapter)))
        self._next += 1

    def drain(self) -> None:
        """Runs iterations until all requests have been answered."""
        while len(self.link.ended) < self._next:
            if not self._loop.iterate():
                time.sleep(0.001)  # a grammar is being compiled

    def turn(self) -> None:
        self._loop.iterate()


def traffic(served: Served) -> Iterator[str]:
    """Serves one request of each kind, then many requests of all kinds, then long ones. Yields each part's name."""
    for sampling in SAMPLINGS:
        served.say(21, sampling)
        served.drain()
    yield "one by one"
    rng = random.Random(1)
    for crowd in (2, 3, 9, 33, 70):
        for i in range(crowd):
            served.say(rng.choice((1, 2, 15, 16, 63, 200, 511, 700)), SAMPLINGS[i % len(SAMPLINGS)])
            if rng.random() < 0.2:
                served.turn()
        served.drain()
    yield "crowds"
    for length in (1023, 3000, LONGEST - 45):
        for sampling in SAMPLINGS[:2]:
            served.say(length, sampling)
    served.drain()
    yield "long ones"


def traffic_with_adapters(served: Served, adapters: list[Adapter]) -> None:
    """Serves requests with and without adapters. The second adapter makes earlier graphs expire."""
    for together in (adapters[:1], adapters, adapters):
        for number, adapter in enumerate([*together, None, *together]):
            served.say(9 + 5 * number, Sampling(6, temperature=0.0), adapter)
        served.drain()


def adapters_of(folder: Path) -> list[Adapter]:
    """Draws adapters for the model in `folder`. The second changes more linears, with a higher rank."""
    drawn = [folder / "narrow", folder / "wide"]
    if not drawn[0].exists():  # drawn once, before a way adds the tensors of a head, which adapters do not change
        draw_adapter(folder, drawn[0], 1, r=8, targets=("q_proj", "v_proj"))
        draw_adapter(folder, drawn[1], 2, r=40)
    return [Adapter(one.name, str(one), read_files(str(one)).sha256) for one in drawn]


def steady(served: Served, machine: Machine) -> tuple[Counter[str], Counter[str]]:
    """Returns the places where the host waits for the device in ten decode steps of three running sequences, and what
    is launched outside of graphs there.
    """
    for _ in range(3):
        served.say(30, Sampling(120, temperature=0.8, seed=1))
    for _ in range(12):
        served.turn()
    machine.waits.clear()
    before = machine.launched + machine.launches.names
    for _ in range(10):
        served.turn()
    waits, launched = Counter(machine.waits), machine.launched + machine.launches.names - before
    served.drain()
    return waits, launched


class Heard(logging.Handler):
    """Collects the worker's warnings, for example of a feature that it leaves unused."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def eager_steps(runner: Runner) -> list[Plan]:
    """Returns a list to which every later step that no graph replays is added."""
    found: list[Plan] = []
    inputs = runner._inputs

    def inputs_of(plan: Plan, before: Any) -> Any:
        found.append(plan)
        return inputs(plan, before)

    runner._inputs = inputs_of  # type: ignore[method-assign]
    return found


def drafting_problems(engine: Engine, launched: Counter[str]) -> list[str]:
    """Returns what a drafter on a GPU must not do. launched: what steady() launched outside of graphs.

    The inputs of a step are sent in one copy, a page of K/V or the end of a step in a few; no kernel is launched.
    """
    speculation = engine.scheduler.speculation
    assert speculation is not None
    drafter = speculation.proposer
    assert isinstance(drafter, NeuralDrafter)
    copies = {"aten::copy_", "aten::cat", "aten::index_copy_", "aten::_to_copy"}
    problems = [f"{count} times {name} outside of graphs" for name, count in launched.items() if name not in copies]
    if drafter.failed or not speculation.accepted_tokens:
        problems.append(f"no drafts: {speculation.draft_tokens} drafted, failed: {drafter.failed}")
    return problems


def replayable(plan: Plan) -> bool:
    """Whether graphs can replay a step: it must be small and score no prompt. Sampling parameters do not matter."""
    scores = any(
        chunk.sequence.sampling.prompt_logprobs and chunk.start < chunk.sequence.prompt_len for chunk in plan.chunks
    )
    return plan.tokens <= FREE_PADDING and not scores


def profile_memory(folder: Path, way: str) -> tuple[list[Compilation], list[str]]:
    """Runs one worker. Returns all compilations, and a sentence for each error; prints a line."""
    heard = Heard()
    logging.getLogger("sluice").addHandler(heard)
    with gpu() as machine:
        adapters = adapters_of(folder)
        engine = started(folder, way, LONGEST)
        made, recordings = machine.launches.compilations, machine.recordings
        start, replays = len(made), machine.replays
        eager, drafter = eager_steps(engine.runner), None
        if way in DRAFTERS and engine.scheduler.speculation is not None:
            drafter = engine.scheduler.speculation.proposer
        of_drafts = eager_steps(drafter.steps.runner) if isinstance(drafter, NeuralDrafter) else []
        served = Served(engine, folder)
        late = []
        for name in traffic(served):
            late += [f"{name}: {one.key}" for one in made[start + len(late) :]]
        waits, launched = steady(served, machine)
        later = machine.recordings - recordings
        adapted, eager_before = "", len(eager)
        if way != "plain" and engine.spec.experts is None:
            traffic_with_adapters(served, adapters)
            captured = machine.recordings - recordings - later
            adapted = f"with adapters {captured} recorded, {len(eager) - eager_before} steps without graphs; "
        failed = [end for end in served.link.ended if end.outcome not in (Outcome.LENGTH, Outcome.EOS)]
        engine.compiler.close()
    print(
        f"{folder.name:14} {way:10} compiled at start {start}, later {len(late)}; recorded {recordings} and {later}; "
        f"{adapted}{machine.replays - replays} replays and {len(eager)} steps without graphs; ten steps wait "
        f"{sum(waits.values())} times",
        flush=True,
    )
    logging.getLogger("sluice").removeHandler(heard)
    problems = [
        *machine.findings,
        *heard.warnings,
        *(f"compiled while serving: {one}" for one in late),
        *map(str, failed),
        *[f"recorded while serving: {later} graphs"] * bool(later),
        *(f"a step of {plan.tokens} tokens has no graph" for plan in eager if way != "plain" and replayable(plan)),
        *(f"a step of {plan.tokens} tokens of a drafter has no graph" for plan in of_drafts),
        *(drafting_problems(engine, launched) if way in DRAFTERS else ()),
    ]
    if way in DRAFTERS:
        speculation = engine.scheduler.speculation
        print(f"{speculation.draft_tokens} drafts, {speculation.accepted_tokens} accepted; ten steps: {dict(launched)}")
    problems += [
        f"a decode waits: {place}" for place in waits if "step.py" not in place and "cuda_graph_inputs.py" not in place
    ]
    if served.link.ids.keys() - {0}:
        problems.append(f"ids were read before they were there: {served.link.ids}")
    return made, problems


def main(words: list[str]) -> int:
    models = [word for word in words if word in CONFIGS] or list(CONFIGS)
    ways = [word for word in words if word in WAYS] or list(WAYS)
    made: dict[str, Compilation] = {}
    problems = []
    for model in models:
        with nullcontext() if "--compile" in words else few_experts(), tempfile.TemporaryDirectory() as root:
            (Path(root) / model).mkdir()
            folder = checkpoint(Path(root) / model, model)
            gc.freeze()  # imported objects stay for ever, so the worker's garbage collections need not visit them
            for way in ways:
                compilations, found = profile_memory(folder, way)
                made |= {one.key: one for one in compilations}
                problems += [f"{model}, {way}: {problem}" for problem in found]
                gc.collect()
    print(f"{len(made)} different compilations")
    if "--compile" in words:
        problems += compile_all(made.values())
    print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
