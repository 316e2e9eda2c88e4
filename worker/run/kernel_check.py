"""Whether a GPU computes with Triton's kernels what plain PyTorch computes on it, asked before anybody is served.

A compiler or a device may be wrong in silence. So a few steps for nobody go through the loaded model's own layers, the
first of each kind, and every operation in them runs both ways on the same inputs. Where one differs, or fails, all run
in their plain forms from then on.
"""

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.config import WorkerConfig
from shared.messages import Sampling
from worker.kernels.operations import TORCH, Operations
from worker.kernels.split_k import sum_split_k
from worker.kv_cache.sizing import PoolBudget
from worker.kv_cache.tensors import Cache, kv_format
from worker.model.decoder import Decoder
from worker.run.inputs import build_inputs
from worker.run.runner import DeviceBroken
from worker.run.sampler import choose
from worker.run.warmup import CHOSEN, Bounds, MemoryGauge, profile_memory
from worker.schedule.sequence import Chunk, Plan, Sequence

log = logging.getLogger("sluice.load")

ADVANCES = (3, 1, 40, 1, 19, 130, 1, 512, 512, 1)  # tokens of each sequence, step by step: all tiles, and decodes
LENGTHS = (sum(ADVANCES), 70, 30)
WISHES = (CHOSEN, Sampling(1), Sampling(1, top_p=0.9))
ROUNDINGS, LEAST = 4, 1e-3  # of the format one after another, and what is allowed in any: shares of a row's length
EIGHT_BITS = 2**-3  # in K/V of eight bits, where a number may be rounded to its other neighbour


def choose_operations(
    decoder: Decoder, worker: WorkerConfig, length: int, memory: MemoryGauge, moved: Callable[[], None]
) -> tuple[Decoder, PoolBudget]:
    """The decoder with its operations chosen: those of --kernels, and plain ones if Triton's compute wrongly here.

    Also the memory that is left for the K/V pool: all of them are compiled, and the largest step is measured, for
    sequences of up to `length` tokens. `moved` is called whenever there is progress.

    Raises torch.OutOfMemoryError, or DeviceBroken where a kernel has left the device unusable.
    """
    if worker.kernels == "torch":
        decoder = decoder.using(TORCH)
    if worker.kernels != "auto":
        return decoder, profile_memory(decoder, worker, length, memory, moved)
    name, why = memory.read().name, find_wrong_operations(decoder, worker, length)
    moved()
    if not why:
        try:
            return decoder, profile_memory(decoder, worker, length, memory, moved)
        except Exception as error:
            if _is_full(error):
                raise
            why = f"a step fails ({_said(error)})"
    log.warning(
        "TRITON'S KERNELS ARE NOT USED: on %s %s. Plain PyTorch serves, which is slower, records no CUDA graphs, and "
        "gives bits that may depend on who shares a step", name, why,
    )  # fmt: skip
    return _with_torch(decoder, worker, length, memory, moved, f"on {name} {why}")


def _with_torch(
    decoder: Decoder, worker: WorkerConfig, length: int, memory: MemoryGauge, moved: Callable[[], None], why: str
) -> tuple[Decoder, PoolBudget]:
    plain = decoder.using(TORCH)
    try:
        return plain, profile_memory(plain, worker, length, memory, moved)
    except Exception as error:
        if _is_full(error):
            raise
        raise DeviceBroken(
            f"{why}; after that plain PyTorch fails, too ({_said(error)}), as everything does once a kernel has left "
            "the device unusable: --kernels torch starts without Triton's"
        ) from error


def find_wrong_operations(decoder: Decoder, worker: WorkerConfig, length: int) -> str:
    """Which of the decoder's operations compute something else than the plain ones, in half a sentence; empty: none."""
    both = CompareOperations(decoder.operations, TORCH, decoder.weights.embed.dtype)
    try:
        _compare(decoder, worker, length, both)
    except Exception as error:
        if not both.found:
            log.warning("whether kernels compute what plain PyTorch does is not known: %s", _said(error))
    return ", ".join(f"{name} {what}" for name, what in both.found.items())


class CompareOperations:
    """Runs operations both ways. What the fast form gives goes on where they agree, else what the plain one gives."""

    def __init__(self, fast: Operations, plain: Operations, dtype: torch.dtype) -> None:
        """`dtype`: of what they compute with."""
        self.found: dict[str, str] = {}  # by operation, the first that was wrong
        self.operations = Operations(**{one.name: partial(self._run, one.name) for one in fields(Operations)})
        self._fast, self._plain, self._dtype = fast, plain, dtype

    def _run(self, name: str, *args: Any, **how: Any) -> Any:
        written = args[1:3] if name == "qkv_rope_write" else ()
        copies = tuple(one.clone() for one in written)
        expected = getattr(self._plain, name)(args[0], *copies, *args[1 + len(copies) :], **how)
        try:
            got = getattr(self._fast, name)(*args, **how)
            wrong = self._difference(_tensors(got, written), _tensors(expected, copies))
        except Exception as error:
            if _is_full(error):
                raise
            wrong = f"fails ({_said(error)})"
        if not wrong:
            return got
        self.found.setdefault(name, wrong)
        for one, copy in zip(written, copies, strict=True):
            one.copy_(copy)
        return expected

    def _difference(self, got: list[Tensor], expected: list[Tensor]) -> str:
        for one, other in zip(got, expected, strict=True):
            if not other.is_floating_point():
                if wrong := int((one != other).sum()):
                    return f"chooses another token for {wrong} of {len(other)} rows"
                continue
            away, allowed = worst_row(sum_split_k(one, other.ndim, other.dtype), other), self._allowed(other.dtype)
            if not away <= allowed:
                return f"is off by {away:.2g} of a row's length, where {allowed:.2g} may be rounding"
        return ""

    def _allowed(self, dtype: torch.dtype) -> float:
        rounding = ROUNDINGS * torch.finfo(self._dtype).eps
        return max(rounding, LEAST, EIGHT_BITS if dtype == torch.float8_e4m3fn else 0.0)


def worst_row(got: Tensor, expected: Tensor) -> float:
    """How far the worst row [R, ...] is off, by its length or, where that is more, the median's; NaN is infinitely far.

    Rows that are not finite in `expected` do not count.
    """
    one, other = (x.float().flatten(1) for x in (got, expected))
    lengths = other.norm(dim=1)
    usable = lengths.isfinite()
    typical = torch.where(usable, lengths, torch.nan).nanmedian()
    off = torch.where(usable, (one - other).norm(dim=1), 0.0)
    shares = torch.where(off == 0, 0.0, off / lengths.maximum(typical))
    return float(shares.nan_to_num(torch.inf, posinf=torch.inf).max())


@torch.inference_mode()
def _compare(decoder: Decoder, worker: WorkerConfig, length: int, both: CompareOperations) -> None:
    """Pieces of prompts across pages, decodes and both together, and what is sampled after each."""
    bounds, device = Bounds.of(worker, length), decoder.weights.embed.device
    few = _first_of_each_kind(decoder, length, both)
    sequences = _sequences(bounds, decoder.spec.vocab_size)
    pages = 1 + sum(len(one.pages) for one in sequences)
    kept = kv_format(worker.kv_cache_dtype, decoder.weights.embed.dtype)
    cache = Cache(few.spec, pages, bounds.page_size, kept, device)
    for chunks in _steps(sequences, bounds.tokens):
        packed, _ = build_inputs(chunks, bounds.page_size, device)
        logits = few.forward(packed, cache)
        choose(logits, Plan(chunks).rows, few.spec.eos_ids, both.operations.sample_plain)


def _first_of_each_kind(decoder: Decoder, length: int, both: CompareOperations) -> Decoder:
    """A decoder of some of these layers, the first of each kind: of each spec, and of each format of weights."""
    spec, weights = decoder.spec, decoder.weights
    kinds: dict[object, int] = {}
    for index, (kind, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        products = layer.qkv, layer.o, layer.gate_up, layer.down
        kinds.setdefault((kind, *((packed.weight.dtype, packed.dynamic) for packed in products)), index)
    chosen = [*kinds.values()]
    return Decoder(
        replace(spec, layers=tuple(spec.layers[index] for index in chosen)),
        replace(weights, layers=[weights.layers[index] for index in chosen]),
        min(length, LENGTHS[0]),
        both.operations,
    )


def _sequences(bounds: Bounds, vocab: int) -> list[Sequence]:
    """Of tokens from all over the vocabulary, on pages in no order."""
    sequences, page = [], 1
    for number, (most, wish) in enumerate(zip(LENGTHS, WISHES, strict=True)):
        tokens = [(7919 * (number + 3 * at) + 11) % vocab for at in range(min(most, bounds.length))]
        count = -(-len(tokens) // bounds.page_size)
        pages, page = array("i", reversed(range(page, page + count))), page + count
        sequences.append(Sequence((b"", number), tokens, len(tokens), wish, seed=number, arrival=0.0, pages=pages))
    return sequences


def _steps(sequences: list[Sequence], tokens: int) -> Iterator[list[Chunk]]:
    """Their chunks, step by step: of at most `tokens` tokens, but one at least of each sequence."""
    for advance in ADVANCES:
        live = [one for one in sequences if one.computed_tokens < len(one.tokens)]
        if not live:
            return
        each = max(1, min(advance, tokens // len(live)))
        chunks = [
            Chunk(one, one.computed_tokens, min(each, len(one.tokens) - one.computed_tokens), True) for one in live
        ]
        yield chunks
        for chunk in chunks:
            chunk.sequence.computed_tokens += chunk.length


def _tensors(given: Tensor | tuple[Tensor, ...], written: tuple[Tensor, ...]) -> list[Tensor]:
    """What an operation returned, and what it wrote to: caches, a row for each slot."""
    returned = given if isinstance(given, tuple) else (given,)
    return [*returned, *(cache.flatten(0, 1) for cache in written)]


def _is_full(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
