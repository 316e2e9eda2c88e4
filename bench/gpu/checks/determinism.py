"""Promises about whole steps: the same bits in any company and any chunks, the same ids by every road."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.context import Place, Row, spec_of
from bench.gpu.setup.harness import PAGE_SIZE, Setup, rig
from bench.gpu.setup.steps import last, packed, sequences
from bench.gpu.setup.unfused import INSTEAD, without
from bench.gpu.setup.weights import random_weights
from bench.gpu.tables import FAIL, PASS
from shared.messages import Sampling
from worker.kernels.quantize import Scheme
from worker.kv_cache.tensors import Cache, kv_format
from worker.model.decoder import Decoder, Weights
from worker.model.spec import ModelSpec
from worker.schedule.sequence import Chunk, Sequence

COMPANY = (1, 3, 40, 129, 500, 17, 64, 333, 2, 260, 31)  # tokens of others
BASE = Setup()
WIDENED = (
    Setup(weights=Scheme("int8")),
    Setup(weights=Scheme("fp8")),
)  # on the CPU, where K/V of eight bits promise nothing
DYNAMIC = (Setup(weights=Scheme("int8", dynamic=True)), Setup(weights=Scheme("fp8", dynamic=True)))
FORMATS = (Setup(kv="fp8"), *WIDENED, *DYNAMIC)


@torch.inference_mode()
def same_bits(place: Place, model: str) -> Iterator[Row]:
    """Logits of a real model's first layers: one sequence alone, beside others, in chunks, as a decode."""
    spec = spec_of(model, place.sizes.layers)
    formats = (BASE, *(FORMATS if place.cuda else WIDENED)) if model == place.models[0] else (BASE,)
    for format in formats:
        forwards = _Forwards(place, spec, format)
        alone = forwards.alone()
        for way, run in forwards.ways().items():
            forwards.poison()
            yield _bits(f"bits, {model}{format.said}, {way}", alone, run())


class _Forwards:
    """Steps of a decoder without a scheduler; `one` is the sequence whose last logits they give."""

    def __init__(self, place: Place, spec: ModelSpec, setup: Setup) -> None:
        length = place.sizes.check
        weights = random_weights(spec, place.dtype, place.device, seed=place.seed, scheme=setup.weights)
        lengths = (length, *(min(n, length) for n in COMPANY))
        (self._one, *self._others), pages = sequences(lengths, PAGE_SIZE, spec.vocab_size, place.seed)
        self._length, self._device = length, place.device
        self._decoder = Decoder(spec, weights, length + 1)
        self._cache = Cache(spec, pages, PAGE_SIZE, kv_format(setup.kv, place.dtype), place.device)

    def poison(self) -> None:
        """Nothing that an earlier step wrote is to be read again: NaN in every format."""
        for part in (self._cache.k, self._cache.v):
            part.view(torch.uint8).fill_(0xFF)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        length, whole = self._length, [last(other, len(other.tokens)) for other in self._others]
        return {
            "twice": self.alone,
            "beside prompts": lambda: self._logits(last(self._one, length), *whole),
            "in two chunks": lambda: self._in_chunks((length // 3,)),
            "in odd chunks": lambda: self._in_chunks((1, length // 5, length // 5 + 1, length - 7)),
            "as a decode": lambda: self._decoded([]),
            "as a decode beside decodes": lambda: self._decoded(self._others),
        }

    def alone(self) -> Tensor:
        return self._logits(last(self._one, self._length))

    def _logits(self, *chunks: Chunk) -> Tensor:
        """Of the first chunk's last row."""
        return self._decoder.forward(packed(list(chunks), PAGE_SIZE, self._device), self._cache)[0].clone()

    def _in_chunks(self, cuts: tuple[int, ...]) -> Tensor:
        for begin, end in zip((0, *cuts), (*cuts, self._length), strict=True):
            found = self._logits(last(self._one, end - begin, upto=end))
        return found

    def _decoded(self, company: list[Sequence]) -> Tensor:
        for each in (self._one, *company):
            before = len(each.tokens) - 1
            if before:
                self._logits(last(each, before, upto=before))
        return self._logits(last(self._one, 1), *(last(other, 1) for other in company))


def _bits(what: str, alone: Tensor, other: Tensor) -> Row:
    differ = int((alone != other).sum())
    well = torch.isfinite(alone).all() and torch.equal(alone, other)
    row: Row = {"what": what, "cases": 1, "worst": float((alone - other).abs().max()), "bound": 0.0}
    note = "" if well else f"{differ} of {len(alone)} logits differ"
    return row | {"result": PASS if well else FAIL} | ({"note": note} if note else {})


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    setup: Setup = BASE


WAYS = (
    Way("again"),
    Way("prompts in chunks of 33", Setup(step_tokens=33)),
    Way("without graphs and overlap", Setup(graphs=False, overlap=False)),
    Way("nothing fused", Setup(operations=without(*INSTEAD))),
)
MORE_WAYS = (  # for one model
    Way("prompts in chunks of 64", Setup(step_tokens=64)),
    Way("without graphs", Setup(graphs=False)),
    Way("without overlap", Setup(overlap=False)),
    *(Way(f"not {fusion}", Setup(operations=without(fusion))) for fusion in INSTEAD),
)


def same_ids(place: Place, model: str) -> Iterator[Row]:
    """Ids of several sequences, some greedy and some drawn, through the whole loop."""
    spec = spec_of(model, place.sizes.layers)
    weights = random_weights(spec, place.dtype, place.device, seed=place.seed)
    expected = _ids(place, spec, weights, BASE)
    distinct = len({id for ids in expected for id in ids})
    for way in (*WAYS, *(MORE_WAYS if model == place.models[0] else ())):
        found = _ids(place, spec, weights, way.setup)
        wrong = sum(one != other for one, other in zip(expected, found, strict=True))
        row: Row = {"what": f"ids, {model}, {way.name}", "cases": len(expected), "worst": wrong, "bound": 0.0}
        row |= {"result": FAIL if wrong else PASS}
        yield row | ({"note": f"{wrong} sequences differ ({distinct} distinct ids in all)"} if wrong else {})


def _ids(place: Place, spec: ModelSpec, weights: Weights, setup: Setup) -> list[list[int]]:
    check, new = place.sizes.check, place.sizes.new
    made = rig(place, spec, setup, slots=16, longest=check + new + 1, weights=weights)
    lengths = (check, 1, 7, check // 2, 30, 64)
    taken = []
    for at, length in enumerate(lengths):
        sampling = Sampling(new, temperature=at % 2 * 0.9, top_p=0.9, seed=at, ignore_eos=True)
        taken += made.submit([made.prompt(min(length, check))], sampling)
    made.drain()
    return [sequence.tokens[sequence.prompt_len :] for sequence in taken]
