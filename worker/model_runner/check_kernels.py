"""Checks before serving that, on this GPU, the Triton kernels compute the same results as plain PyTorch.

A compiler or a device may compute wrong results without any error. The check therefore runs a few dummy steps through
the first layer of each kind of the loaded model, and computes each operation with Triton and with PyTorch on the same
inputs. If an operation fails, or its results differ, PyTorch computes all operations from then on.
"""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.kv_cache.sizing import PoolBudget
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model_runner.inputs import build_inputs
from worker.model_runner.runner import DeviceBroken
from worker.model_runner.sampler import sample_rows
from worker.model_runner.warmup import PLAIN, MemoryGauge, StepLimits, profile_memory
from worker.models.decoder import Decoder
from worker.operations import TORCH, Operations
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe import clear_choices
from worker.ops.moe.packed import Experts, PackedExperts
from worker.ops.norm.reference import sum_split_k
from worker.ops.recurrent_state import RecurrentState
from worker.ops.sampling.reference import wrong_draws
from worker.scheduler.sequence import Chunk, Plan, Sequence, SequenceStates, slots_of

log = logging.getLogger("sluice.load")
CHUNK_LENGTHS = (3, 1, 40, 1, 19, 130, 1, 512, 512, 1)  # chunk length in each step, chosen to use all tile sizes
SEQUENCE_LENGTHS = (sum(CHUNK_LENGTHS), 70, 30)
SEQUENCE_SAMPLINGS = (PLAIN, Sampling(1), Sampling(1, top_p=0.9))
MAX_ROUNDINGS = 4  # the tolerance of an operation, in rounding errors of its format
STATES = {"delta_net": 4, "mamba2": 4, "short_conv": 2}  # operation → index of the argument that is its recurrent state
MIN_TOLERANCE = 1e-3  # the least tolerance for any format, as a share of the norm of a row
FP8_TOLERANCE = 2**-3  # the tolerance for 8-bit K/V: Triton may round a number up, and PyTorch down
# The least tolerance of an operation that multiplies fp8 by fp8. Tensor cores keep only about 13 bits of the sum of 128
# such products, so a row may be off by 0.0014 of its length. Experts also round what lies between their two products to
# fp8, where numbers near the middle of two codes may get another code: a row may be off by 0.022.
FP8_PRODUCTS = {"linear": 2**-8, "gated_linear": 2**-8, "experts": 2**-5}


def choose_operations(
    decoder: Decoder, worker: WorkerConfig, length: int, memory: MemoryGauge, on_progress: Callable[[], None]
) -> tuple[Decoder, PoolBudget]:
    """Returns the decoder with the operations of --kernels, and the memory that is left for the K/V pool.

    With --kernels auto, the decoder gets plain operations if Triton's are wrong on this device. To find how much memory
    is left, this compiles all kernels and measures the largest step, for sequences of up to `length` tokens.

    Raises torch.OutOfMemoryError, or DeviceBroken if a kernel has left the device unusable.
    """
    if worker.kernels == "torch":
        decoder = decoder.with_operations(TORCH)
    if worker.kernels != "auto":
        return decoder, profile_memory(decoder, worker, length, memory, on_progress)
    name, problem = memory.read().name, find_wrong_operations(decoder, worker, length)
    on_progress()
    if not problem:
        try:
            return decoder, profile_memory(decoder, worker, length, memory, on_progress)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            problem = f"a step fails ({summary(error)})"
    log.warning(
        "TRITON'S KERNELS ARE NOT USED: on %s %s. Plain PyTorch serves, which is slower, captures no CUDA graphs, and "
        "gives bits that may depend on the other requests of a step", name, problem,
    )  # fmt: skip
    return _with_torch(decoder, worker, length, memory, on_progress, f"on {name} {problem}")


def _with_torch(
    decoder: Decoder,
    worker: WorkerConfig,
    length: int,
    memory: MemoryGauge,
    on_progress: Callable[[], None],
    problem: str,
) -> tuple[Decoder, PoolBudget]:
    plain = decoder.with_operations(TORCH)
    try:
        return plain, profile_memory(plain, worker, length, memory, on_progress)
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        raise DeviceBroken(
            f"{problem}; after that plain PyTorch fails, too ({summary(error)}), as everything does once a kernel has "
            "left the device unusable: --kernels torch starts without Triton's"
        ) from error


def find_wrong_operations(decoder: Decoder, worker: WorkerConfig, length: int) -> str:
    """Returns which operations of the decoder differ from plain PyTorch's, and how, or "" if none differs."""
    both = CompareOperations(decoder.operations, TORCH, decoder.weights.embed.dtype)
    try:
        _compare(decoder, worker, length, both)
    except Exception as error:
        if not both.problems:
            log.warning("cannot check whether kernels compute what plain PyTorch does: %s", summary(error))
    if both.rounded_draws:
        log.info("%d sampled tokens differ from plain PyTorch's by rounding", both.rounded_draws)
    return ", ".join(f"{name} {problem}" for name, problem in both.problems.items())


class CompareOperations:
    """Runs each operation in its fast and its plain form. If the results differ, it returns those of the plain form."""

    def __init__(self, fast: Operations, plain: Operations, dtype: torch.dtype) -> None:
        """dtype: the format that the operations compute in."""
        self.problems: dict[str, str] = {}  # operation → its first problem
        self.rounded_draws = 0  # how many sampled tokens differ only because of rounding
        self.operations = Operations(**{item.name: partial(self._run, item.name) for item in fields(Operations)})
        self._fast, self._plain, self._dtype = fast, plain, dtype

    def _run(self, name: str, *args: Any, **options: Any) -> Any:
        caches = _written(name, args)
        copies = tuple(cache.clone() for cache in caches)
        expected = getattr(self._plain, name)(*_writing_to(copies, name, args), **options)
        try:
            actual = getattr(self._fast, name)(*args, **options)
            got, wanted = _outputs(actual, caches), _outputs(expected, copies)
            if name == "experts":  # compare only rows with a clear choice of experts: near ties may go either way
                clear = clear_choices(*args[:3], groups=options.get("groups"), sigmoid=options.get("sigmoid", False))
                got, wanted = [got[0].where(clear[:, None], 0.0)], [wanted[0].where(clear[:, None], 0.0)]
            if name == "sample_plain":
                got = [self._ids(args, got[0], wanted[0])]
            problem = self._difference(got, wanted, FP8_PRODUCTS.get(name, 0.0) if _multiplies_fp8(args) else 0.0)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            problem = f"fails ({summary(error)})"
        if not problem:
            return actual
        self.problems.setdefault(name, problem)
        for cache, copy in zip(caches, copies, strict=True):
            cache.copy_(copy)
        return expected

    def _ids(self, args: tuple[Any, ...], got: Tensor, wanted: Tensor) -> Tensor:
        """Returns the ids in `got`. Where rounding alone explains a difference, it returns the id in `wanted`."""
        if torch.equal(got, wanted):
            return got
        logits, params, stages = args
        wrong = wrong_draws(logits, params, stages, got, wanted)
        self.rounded_draws += int(((got != wanted) & ~wrong).sum())
        return torch.where(wrong, got, wanted)

    def _difference(self, got: list[Tensor], expected: list[Tensor], least: float) -> str:
        """least: the least tolerance, as a share of a row's length"""
        for actual, wanted in zip(got, expected, strict=True):
            if not wanted.is_floating_point():
                if wrong := int((actual != wanted).sum()):
                    return f"chooses another token for {wrong} of {len(wanted)} rows"
                continue
            error = worst_row(sum_split_k(actual, wanted.ndim, wanted.dtype), wanted)
            tolerance = max(self._tolerance(wanted.dtype), least)
            if not error <= tolerance:
                return f"is off by {error:.2g} of a row's length, where {tolerance:.2g} may be rounding"
        return ""

    def _tolerance(self, dtype: torch.dtype) -> float:
        rounding = MAX_ROUNDINGS * torch.finfo(self._dtype).eps
        return max(rounding, MIN_TOLERANCE, FP8_TOLERANCE if dtype == torch.float8_e4m3fn else 0.0)


def _multiplies_fp8(args: tuple[Any, ...]) -> bool:
    """Whether an argument of an operation is a weight in fp8 that is multiplied by activations in fp8."""
    parts = [part for arg in args for part in ((arg.gate_up, arg.down) if isinstance(arg, Experts) else (arg,))]
    weights = [part for part in parts if isinstance(part, PackedLinear | PackedExperts)]
    return any(one.dynamic and one.weight.dtype == torch.float8_e4m3fn for one in weights)


def _written(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Returns those of the arguments that the operation writes to: K/V or recurrent states."""
    if name in STATES:
        return args[STATES[name]].tail, args[STATES[name]].memory
    return tuple(cache for cache in args[1:3] if cache is not None) if name == "qkv_rope_write" else ()


def _writing_to(copies: tuple[Tensor, ...], name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, with `copies` in place of the tensors that the operation writes to."""
    if name in STATES:
        return *args[: STATES[name]], RecurrentState(*copies), *args[STATES[name] + 1 :]
    return args[0], *copies, *args[1 + len(copies) :]


def worst_row(got: Tensor, expected: Tensor) -> float:
    """Returns the largest error of any row [R, ...], relative to the larger of the row's norm and the median norm.

    NaN counts as an infinite error. Rows that are not finite in `expected` are ignored.
    """
    actual, wanted = (x.float().flatten(1) for x in (got, expected))
    lengths = wanted.norm(dim=1)
    usable = lengths.isfinite()
    typical = torch.where(usable, lengths, torch.nan).nanmedian()
    off = torch.where(usable, (actual - wanted).norm(dim=1), 0.0)
    shares = torch.where(off == 0, 0.0, off / lengths.maximum(typical))
    return float(shares.nan_to_num(torch.inf, posinf=torch.inf).max())


@torch.inference_mode()
def _compare(decoder: Decoder, worker: WorkerConfig, length: int, both: CompareOperations) -> None:
    """Computes and samples steps with prompt chunks across pages, with decodes, and with both."""
    limits, device = StepLimits.of(worker, length), decoder.weights.embed.device
    small = first_layers(decoder, min(length, SEQUENCE_LENGTHS[0]), both.operations)
    kinds = zip(SEQUENCE_LENGTHS, SEQUENCE_SAMPLINGS, strict=True)
    sequences = sequences_of(kinds, limits, decoder.spec.vocab_size)
    cache = cache_for(sequences, small, worker, limits.page_size)
    for chunks in _steps(sequences, limits.tokens):
        inputs, _ = build_inputs(chunks, limits.page_size, device, recurrent=bool(cache.states))
        logits = small.forward(inputs, cache)
        sample_rows(logits, Plan(chunks).rows, small.spec.eos_ids, both.operations.sample_plain)


def _steps(sequences: list[Sequence], max_tokens: int) -> Iterator[list[Chunk]]:
    """Yields the chunks of each step: at most `max_tokens` tokens in all, but at least one token of each sequence."""
    for chunk_length in CHUNK_LENGTHS:
        live = [sequence for sequence in sequences if sequence.uncomputed_tokens]
        if not live:
            return
        most = max(1, min(chunk_length, max_tokens // len(live)))
        chunks = [
            Chunk(sequence, sequence.computed_tokens, min(most, sequence.uncomputed_tokens), True) for sequence in live
        ]
        yield chunks
        for chunk in chunks:
            advance(chunk)


def _outputs(result: Tensor | tuple[Tensor, ...], caches: tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the results of an operation, and the caches that it wrote to, reshaped to one row per slot or state."""
    returned = result if isinstance(result, tuple) else (result,)
    return [*returned, *(cache.flatten(0, max(0, cache.ndim - 3)) for cache in caches)]


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def summary(error: Exception) -> str:
    """Returns the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


# Makes the inputs of the checks before serving: a decoder with few layers, and sequences with their own K/V cache.


def first_layers(decoder: Decoder, length: int, operations: Operations, least: int = 1) -> Decoder:
    """Returns a decoder with only the first layer of each kind, and the layers whose K/V these layers share.

    Layers are of the same kind if their specs and the formats of their weights are equal. length: tokens of the longest
    sequence of the new decoder. least: the first `least` layers are always kept.
    """
    spec, weights = decoder.spec, decoder.weights
    kinds: dict[object, int] = {}
    for index, (kind, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        kinds.setdefault((kind, *(linear.format for linear in layer.linears)), index)
    wanted = {*kinds.values(), *range(min(least, len(spec.layers)))}
    shared = {owner for index in wanted if (owner := spec.layers[index].shares) is not None}
    chosen = sorted(wanted | shared)
    layers = [spec.layers[index] for index in chosen]
    renumbered = (
        replace(layer, shares=None if layer.shares is None else chosen.index(layer.shares)) for layer in layers
    )
    small = Decoder(
        replace(spec, layers=tuple(renumbered)),
        replace(weights, layers=[weights.layers[index] for index in chosen]),
        length,
        operations,
    )
    small.exchange = decoder.exchange
    return small


def sequences_of(kinds: Iterable[tuple[int, Sampling]], limits: StepLimits, vocab: int) -> list[Sequence]:
    """Makes a sequence for each (length, sampling) in `kinds`. The limits may shorten sequences.

    The tokens are from the whole vocabulary. The first sequence gets the pages from page 1 on, the next one the pages
    after these; each sequence has its pages in descending order. Each sequence gets two slots for recurrent states,
    from slot 1 on.
    """
    sequences, page = list[Sequence](), 1
    for number, (most, sampling) in enumerate(kinds):
        tokens = [(7919 * (number + 3 * at) + 11) % vocab for at in range(min(most, limits.length))]
        count = -(-len(tokens) // limits.page_size)
        pages, page = array("i", reversed(range(page, page + count))), page + count
        own = [2 * number + 1, 2 * number + 2]
        sequences.append(
            Sequence(
                (b"", number), tokens, len(tokens), sampling, number, pages=[pages], states=SequenceStates(free=own)
            )
        )
    return sequences


def cache_for(sequences: Seq[Sequence], decoder: Decoder, worker: WorkerConfig, page_size: int) -> KVCache:
    """Makes a K/V cache with the pages and slots of these sequences."""
    embed = decoder.weights.embed
    pages = 1 + sum(len(sequence.pages[0]) for sequence in sequences)
    slots = 1 + sum(len(slots_of(sequence).free) for sequence in sequences)
    kv_dtype = kv_format(worker.kv_cache_dtype, embed.dtype)
    return KVCache(
        decoder.spec, (pages,), page_size, kv_dtype, embed.device, state_slots=slots, state_dtype=embed.dtype
    )


def advance(chunk: Chunk) -> None:
    """Counts the tokens of a chunk as computed. The slot that was written becomes the slot to read next."""
    sequence = chunk.sequence
    sequence.computed_tokens += chunk.length
    states = slots_of(sequence)
    written = states.free.pop()
    if chunk.start:
        states.free.append(states.at.pop(chunk.start))
    states.at[sequence.computed_tokens] = written
