"""The worker's real loop, request table, scheduler and sampler over a tiny random model, with grammars."""

import random
import time
from functools import cache
from pathlib import Path
from typing import Any

from frontend.structured_output import grammar as build
from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests.checkpoints import EOS, VOCAB
from tests.patience import PATIENCE_S
from tests.worker.engine.harness import Bench as LoopBench
from tests.worker.engine.harness import FakeServer
from worker.engine.build import Engine, load_engine
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 2, 34]}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
NAMED = build.json_schema(PERSON, "x")
PROMPT = list(range(20, 40))


@cache
def engine_of(folder: Path) -> Engine:
    worker = WorkerConfig(device="cpu", dtype="float32", threads=1, kv_cache_gb=0.02, max_waiting_requests=300)
    return load_engine(ModelConfig(model=str(folder), max_seq_len=512), worker)


class Bench(LoopBench):
    """A compute loop over a real runner. Tests run its iterations."""

    def __init__(self, engine: Engine) -> None:
        self.now, self.engine = 0.0, engine
        self.scheduler, self.server = engine.scheduler, FakeServer()
        stats, metrics = Stats(), Metrics()
        self.compiler = engine.compiler
        self.request_table = RequestTable(
            self.scheduler, stats, metrics, vocab_size=VOCAB, seeds=random.Random(0), compiler=self.compiler,
            clock=lambda: self.now,
        )  # fmt: skip
        self.loop = Loop(
            self.scheduler, engine.runner, self.request_table, self.server, stats, metrics, lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip

    def wait_for_grammars(self) -> None:
        """Waits until no grammar is being compiled."""
        deadline = time.monotonic() + PATIENCE_S
        while any(not future.done() for future in self.compiler._cache.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def finish(self) -> None:
        self.iterate()
        self.wait_for_grammars()
        self.drain()

    def text(self, tokens: list[int]) -> str:
        return self.compiler._vocabulary.result().decode_bytes([token for token in tokens if token != EOS]).decode()

    def rejected(self) -> dict[int, m.Rejected]:
        return {one.id: one for _, step in self.server.sent for one in step.rejected}


def submit(id: int, made: str, max_tokens: int = 200, **options: Any) -> m.Submit:
    fields = {name: options.pop(name) for name in list(options) if name in m.Submit.__struct_fields__}
    sampling = m.Sampling(max_tokens, **{"seed": id, **options}, grammar=made)
    return m.Submit(id, pack_u32(PROMPT), sampling, **fields)


def alone(bench: Bench, *requests: m.Submit) -> tuple[dict[int, list[int]], dict[int, m.End]]:
    bench.server.sent.clear()
    bench.send(*requests)
    bench.finish()
    return bench.received()
