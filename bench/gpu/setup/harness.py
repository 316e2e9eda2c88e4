"""Runs the worker's own loop with random weights and without sockets, so that the timed code is the server's.

Sequences may start with random K/V, so that their contexts need not be computed.
"""

import gc
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from bench.gpu.environment import Environment
from bench.gpu.setup.weights import random_weights
from bench.micro.step import EncodingServer
from shared.config.declaration import words
from shared.config.worker import WorkerConfig
from shared.messages import Abort, Sampling, Submit
from shared.wire import pack_u32
from worker.engine.loop import Loop
from worker.engine.metrics import Metrics, Stats
from worker.engine.requests import RequestTable
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model_runner.check_bits import with_checked_cublas
from worker.model_runner.runner import Runner
from worker.models.decoder import Decoder, Weights
from worker.operations import FAST, Operations, with_options
from worker.ops.launch_options import NO_OPTIONS, GpuOptions, options_named
from worker.ops.linear.cublas import FEWEST_ROWS
from worker.ops.quantized_weight import Scheme
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Sequence
from worker.spec import ModelSpec

FRONTEND = b"frontend"
ENDLESS = 1 << 20
PAGE_SIZE = WorkerConfig().page_size
SERVED = options_named(words(WorkerConfig().gpu_options))  # the options of a server without flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Selects parts of the fast path, the formats of K/V and weights, and the chunk size of prompts.

    kv: a value of --kv-cache-dtype. step_tokens: tokens per chunk; 0: each prompt is one chunk.
    """

    invariant: bool = True
    graphs: bool = True
    overlap: bool = True
    kv: str = "auto"
    weights: Scheme | None = None
    step_tokens: int = 0
    operations: Operations = FAST
    options: GpuOptions = NO_OPTIONS

    @property
    def description(self) -> str:
        """Describes the formats that differ from the model's own; empty if none does."""
        cache = f", {self.kv} K/V" if self.kv != "auto" else ""
        return cache + (f", {self.weights} weights" if self.weights else "")


class Harness:
    """One model, its page pool and its loop. The pool holds `slots` sequences of at most `max_length` tokens."""

    def __init__(
        self, env: Environment, spec: ModelSpec, weights: Weights, setup: Setup, *, slots: int, max_length: int
    ) -> None:
        pages = slots * -(-max_length // PAGE_SIZE) + 1
        launches = replace(setup.options, library_products=False)  # which is no option of a launch
        operations = with_options(setup.operations, launches.on(env.device))
        decoder = Decoder(spec, weights, max_length, operations)
        if setup.options.library_products:
            steps = {env.sizes.prompt, setup.step_tokens}
            decoder = with_checked_cublas(decoder, (rows for rows in steps if rows >= FEWEST_ROWS))
        self.spec, self._env, self._max_length = spec, env, max_length
        self.cache = KVCache(spec, (pages,), PAGE_SIZE, kv_format(setup.kv, env.dtype), env.device)
        self.scheduler = Scheduler(_config(setup, slots, max_length), [PagePool(pages, PAGE_SIZE)])
        stats, metrics = Stats(), Metrics()
        self._request_table = RequestTable(
            self.scheduler, stats, metrics, vocab_size=spec.vocab_size, seeds=random.Random(env.seed)
        )
        self._server = EncodingServer()
        graphs = setup.graphs and env.device.type == "cuda"  # not on CPUs: padding may change products' bits
        runner = Runner(
            decoder, self.cache, overlap=setup.overlap, graphs=graphs, max_batch_size=slots,
            batch_invariant=setup.invariant,
        )  # fmt: skip
        self.runner = runner
        self._loop = Loop(self.scheduler, runner, self._request_table, self._server, stats, metrics)  # type: ignore[arg-type]
        self._rng = random.Random(env.seed)
        self._next = 0

    def prompt(self, length: int) -> list[int]:
        return self._rng.choices(range(self.spec.vocab_size), k=length)

    def submit(self, prompts: Seq[Seq[int]], sampling: Sampling) -> list[Sequence]:
        """Submits a request for each prompt. Returns the new sequences, of which no token is computed yet."""
        first = self._next
        for prompt in prompts:
            self._server.inbox.append((FRONTEND, Submit(self._next, pack_u32(list(prompt)), sampling)))
            self._next += 1
        while self._server.inbox:  # one call handles messages for a limited time
            self._request_table.receive(self._server.inbox, 0.0)
        looked_up = [self.scheduler.state.live.get((FRONTEND, id)) for id in range(first, self._next)]
        sequences = [sequence for sequence in looked_up if sequence is not None]
        assert len(sequences) == len(prompts), "a sequence was refused"
        return sequences

    def add_decoding(
        self,
        count: int,
        context: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        logprobs: int | None = None,
        repetition_penalty: float = 1.0,
    ) -> None:
        """Replaces all sequences by `count` sequences of `context` tokens each, whose next step is a decode.

        logprobs, repetition_penalty: apply to the first sequence only.
        """
        self.clear()
        sampling = Sampling(self._max_length - context, temperature=temperature, top_p=top_p, ignore_eos=True)
        first = structs.replace(sampling, logprobs=logprobs, repetition_penalty=repetition_penalty)
        self.submit([self.prompt(context)], first)
        self.submit([self.prompt(context) for _ in range(count - 1)], sampling)
        while self.scheduler.status.waiting or any(one.uncomputed_tokens > 1 for one in self.scheduler.sequences()):
            plan = self.scheduler.plan(0.0)
            self.scheduler.launched(plan)
            self.scheduler.update(plan, [7] * len(plan.sampling), 1.0)

    def fill_cache_randomly(self) -> None:
        """Fills the whole cache with random keys and values."""
        env, generator = self._env, self._env.generator()
        for part in (*self.cache.k, *self.cache.v):
            for layer in part:
                layer.copy_(torch.randn(layer.shape, generator=generator, dtype=env.dtype, device=env.device))

    def clear(self) -> None:
        """Aborts all sequences and waits for the steps in flight."""
        ids = tuple(sequence.key[1] for sequence in self.scheduler.sequences())
        if ids:
            self._server.inbox.append((FRONTEND, Abort(ids)))
        self.drain()

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self._loop.iterate()

    def drain(self) -> None:
        """Runs the loop until every sequence and every step has ended."""
        while self._loop.iterate():
            pass

    def contexts(self) -> list[int]:
        return [len(sequence.tokens) for sequence in self.scheduler.sequences()]


def build_harness(
    env: Environment,
    spec: ModelSpec,
    setup: Setup | None = None,
    *,
    slots: int,
    max_length: int,
    weights: Weights | None = None,
) -> Harness:
    """Returns a harness. Makes random weights unless `weights` is given."""
    gc.collect()  # frees the previous harness, which has reference cycles and holds most of the device's memory
    setup = setup or Setup()
    made = weights or random_weights(
        spec, env.dtype, env.device, invariant=setup.invariant, seed=env.seed, scheme=setup.weights
    )
    return Harness(env, spec, made, setup, slots=slots, max_length=max_length)


def _config(setup: Setup, slots: int, max_length: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_seq_len=max_length,
        max_batch_size=slots,
        use_chunked_prefill=setup.step_tokens > 0,
        prefill_chunk_size=setup.step_tokens or ENDLESS,
        max_step_tokens=setup.step_tokens + slots if setup.step_tokens else ENDLESS,  # room for a chunk and all decodes
        watermark=0.0,
    )
