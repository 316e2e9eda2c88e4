"""Checks that whole steps give the same bits in every batch and chunking, and the same ids in every configuration."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.gpu.environment import Environment, Row, spec_of
from bench.gpu.setup.harness import PAGE_SIZE, Setup, build_harness
from bench.gpu.setup.steps import last, packed, sequences
from bench.gpu.setup.unfused import UNFUSED, without
from bench.gpu.setup.weights import random_weights
from bench.gpu.tables import FAIL, PASS
from shared.messages import Sampling
from worker.kv_cache.tensors import KVCache, kv_format
from worker.models.decoder import Decoder, Weights
from worker.ops.quantized_weight import Scheme
from worker.scheduler.sequence import Chunk, Sequence
from worker.spec import ModelSpec

OTHER_LENGTHS = (1, 3, 40, 129, 500, 17, 64, 333, 2, 260, 31)  # prompt tokens of the other sequences of a batch
LONG = 40_000  # tokens of context; from 32,768 on, attention splits keys into its largest parts
BASE = Setup()
# the only formats checked on the CPU, where eight-bit K/V need not give equal bits
QUANTIZED_WEIGHTS = (Setup(weights=Scheme("int8")), Setup(weights=Scheme("fp8")))
DYNAMIC_QUANTIZED = (Setup(weights=Scheme("int8", dynamic=True)), Setup(weights=Scheme("fp8", dynamic=True)))
FORMATS = (Setup(kv="fp8"), *QUANTIZED_WEIGHTS, *DYNAMIC_QUANTIZED)


@torch.inference_mode()
def check_bits(env: Environment, model: str) -> Iterator[Row]:
    """Compares the logits of a sequence that is computed alone, in a batch, in chunks, and by decode steps.

    Uses the first layers of a real model.
    """
    spec = spec_of(model, env.sizes.layers)
    formats = (BASE, *(FORMATS if env.cuda else QUANTIZED_WEIGHTS)) if model == env.models[0] else (BASE,)
    for format in formats:
        forwards = _Forwards(env, spec, format, env.sizes.check)
        alone = forwards.alone()
        for variant, run in forwards.variants().items():
            forwards.poison()
            yield _bits(f"bits, {model}{format.description}, {variant}", alone, run())


@torch.inference_mode()
def check_long(env: Environment, model: str) -> Iterator[Row]:
    """Checks a model of one layer, with a context so long that attention splits its keys into the largest parts."""
    spec = spec_of(model, env.sizes.layers)
    whole = next(layer for layer in spec.layers if not layer.window)  # every model here has a layer without a window
    length = LONG if env.cuda else env.sizes.check
    forwards = _Forwards(env, replace(spec, layers=(whole,)), BASE, length)
    alone = forwards.alone()
    for variant, run in forwards.variants().items():
        forwards.poison()
        yield _bits(f"bits at {length} tokens, {model}, {variant}", alone, run())


class _Forwards:
    """Computes one sequence in several ways, without a scheduler. Each method returns the sequence's last logits."""

    def __init__(self, env: Environment, spec: ModelSpec, setup: Setup, length: int) -> None:
        weights = random_weights(spec, env.dtype, env.device, seed=env.seed, scheme=setup.weights)
        lengths = (length, *(min(n, length) for n in OTHER_LENGTHS))
        (self._one, *self._others), pages = sequences(lengths, PAGE_SIZE, spec.vocab_size, env.seed)
        self._length, self._device = length, env.device
        self._decoder = Decoder(spec, weights, length + 1)
        self._cache = KVCache(spec, (pages,), PAGE_SIZE, kv_format(setup.kv, env.dtype), env.device)

    def poison(self) -> None:
        """Fills the K/V cache with NaN (in every format), to detect steps that read values of earlier steps."""
        for part in (*self._cache.k, *self._cache.v):
            part.view(torch.uint8).fill_(0xFF)

    def variants(self) -> dict[str, Callable[[], Tensor]]:
        length, whole = self._length, [last(other, len(other.tokens)) for other in self._others]
        return {
            "twice": self.alone,
            "beside prompts": lambda: self._logits(last(self._one, length), *whole),
            "in two chunks": lambda: self._in_chunks((length // 3,)),
            "in odd chunks": lambda: self._in_chunks((1, length // 5, length // 5 + 1, length - 7)),
            "a turn behind a prefix": lambda: self._in_chunks((length - min(64, length // 2),)),
            "as a decode": lambda: self._decoded([]),
            "as a decode beside decodes": lambda: self._decoded(self._others),
        }

    def alone(self) -> Tensor:
        return self._logits(last(self._one, self._length))

    def _logits(self, *chunks: Chunk) -> Tensor:
        """Returns the logits of the first chunk's last row."""
        return self._decoder.forward(packed(list(chunks), PAGE_SIZE, self._device), self._cache)[0].clone()

    def _in_chunks(self, cuts: tuple[int, ...]) -> Tensor:
        for begin, end in zip((0, *cuts), (*cuts, self._length), strict=True):
            found = self._logits(last(self._one, end - begin, upto=end))
        return found

    def _decoded(self, others: list[Sequence]) -> Tensor:
        for each in (self._one, *others):
            before = len(each.tokens) - 1
            if before:
                self._logits(last(each, before, upto=before))
        return self._logits(last(self._one, 1), *(last(other, 1) for other in others))


def _bits(what: str, alone: Tensor, other: Tensor) -> Row:
    differ = int((alone != other).sum())
    well = torch.isfinite(alone).all() and torch.equal(alone, other)
    row: Row = {"what": what, "cases": 1, "worst": float((alone - other).abs().max()), "bound": 0.0}
    note = "" if well else f"{differ} of {len(alone)} logits differ"
    return row | {"result": PASS if well else FAIL} | ({"note": note} if note else {})


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    setup: Setup = BASE


VARIANTS = (
    Variant("again"),
    Variant("prompts in chunks of 33", Setup(step_tokens=33)),
    Variant("without graphs and overlap", Setup(graphs=False, overlap=False)),
    Variant("nothing fused", Setup(operations=without(*UNFUSED))),
)
MORE_WAYS = (  # more variants, for the first model only
    Variant("prompts in chunks of 64", Setup(step_tokens=64)),
    Variant("without graphs", Setup(graphs=False)),
    Variant("without overlap", Setup(overlap=False)),
    *(Variant(f"not {fusion}", Setup(operations=without(fusion))) for fusion in UNFUSED),
)


def check_ids(env: Environment, model: str) -> Iterator[Row]:
    """Runs the worker's loop in each variant and compares the output ids of greedy and of sampled sequences."""
    spec = spec_of(model, env.sizes.layers)
    weights = random_weights(spec, env.dtype, env.device, seed=env.seed)
    expected = _ids(env, spec, weights, BASE)
    distinct = len({id for ids in expected for id in ids})
    for variant in (*VARIANTS, *(MORE_WAYS if model == env.models[0] else ())):
        found = _ids(env, spec, weights, variant.setup)
        wrong = sum(one != other for one, other in zip(expected, found, strict=True))
        row: Row = {"what": f"ids, {model}, {variant.name}", "cases": len(expected), "worst": wrong, "bound": 0.0}
        row |= {"result": FAIL if wrong else PASS}
        yield row | ({"note": f"{wrong} sequences differ ({distinct} distinct ids in all)"} if wrong else {})


def _ids(env: Environment, spec: ModelSpec, weights: Weights, setup: Setup) -> list[list[int]]:
    check, new = env.sizes.check, env.sizes.new
    made = build_harness(env, spec, setup, slots=16, max_length=check + new + 1, weights=weights)
    lengths = (check, 1, 7, check // 2, 30, 64)
    taken = []
    for at, length in enumerate(lengths):
        sampling = Sampling(new, temperature=at % 2 * 0.9, top_p=0.9, seed=at, ignore_eos=True)
        taken += made.submit([made.prompt(min(length, check))], sampling)
    made.drain()
    return [sequence.tokens[sequence.prompt_len :] for sequence in taken]
