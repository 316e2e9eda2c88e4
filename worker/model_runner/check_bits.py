"""Checks before serving that the options of --gpu-options change no bit on this GPU.

The options change how kernels wait for one another. A kernel that does not wait long enough reads old values of an
earlier step, but only if kernels follow one another closely. The check therefore captures a few dummy steps of the
whole model as CUDA graphs with the options, and replays each graph many times, with two sets of tokens in turn. All
logits must have the same bits as the step without options and without a graph.
"""

import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shared.config.declaration import words
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.kv_cache.sizing import PoolBudget, page_size
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model_runner.check_kernels import (
    advance,
    cache_for,
    choose_operations,
    first_layers,
    sequences_of,
    summary,
)
from worker.model_runner.cuda_graph_capture import Capture, EagerGraph, cuda_capture
from worker.model_runner.inputs import build_inputs, to_device
from worker.model_runner.warmup import GREEDY, MemoryGauge, StepLimits
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.operations import TORCH, Operations, with_options
from worker.ops.launch_options import NO_OPTIONS, GpuOptions, options_named
from worker.ops.linear import linear
from worker.ops.linear.cublas import (
    FEWEST_ROWS,
    SCARCE,
    Product,
    can_use_cublas,
    cublas_linear,
    fewest_rows,
    gated_linear_with_cublas,
    linear_with_cublas,
    product_of,
    weight_of_numbers,
)
from worker.ops.linear.packed import PackedLinear
from worker.scheduler.sequence import Chunk, Sequence, SequenceStates, slots_of

log = logging.getLogger("sluice.load")
REPLAYS = 20  # replays of each step
# For each step: how many tokens each sequence has computed before, and how many the first one computes (the others: 1).
Steps = tuple[tuple[tuple[int, ...], int], ...]
STEPS: Steps = (((700,), 1), ((700, 3, 300, 64), 1), ((64, 700, 3), 40))
LONG_PROMPT: Steps = (((300,), 2048),)  # enough rows that the kernel for prefill attention computes them


def checked_on_gpu(
    decoder: Decoder, worker: WorkerConfig, length: int, gpu: MemoryGauge, on_progress: Callable[[], None]
) -> tuple[Decoder, PoolBudget]:
    """Returns the decoder with the fastest operations that are right on this GPU, and the memory that is left for the
    K/V pool.

    length: tokens of the longest sequence. Raises torch.OutOfMemoryError, or DeviceBroken if a kernel has left the
    device unusable.
    """
    decoder = with_cublas_where_equal(with_sound_options(decoder, worker, length), worker)
    return choose_operations(decoder, worker, length, gpu, on_progress)


def with_sound_options(decoder: Decoder, worker: WorkerConfig, length: int) -> Decoder:
    """Returns the decoder with those options of --gpu-options that change no bit. One warning names the other options.

    length: tokens of the longest sequence. Raises torch.OutOfMemoryError.
    """
    device = decoder.weights.embed.device
    asked = replace(options_named(words(worker.gpu_options)), library_products=False)
    wanted = asked.on(device)
    if asked == NO_OPTIONS or worker.kernels == "torch":
        return decoder
    problems = {name: "it needs compute capability 9.0" for name in asked.names if name not in wanted.names}
    sound = _sound_options(decoder, worker, length, wanted, problems) if wanted.names else NO_OPTIONS
    if problems:
        told = ", ".join(f"{name} ({problem})" for name, problem in problems.items())
        log.warning("GPU options are off that were asked for: %s; decodes may be slower without", told)
    if sound.names:
        log.info("GPU options %s are on; test steps had the same bits as without", ", ".join(sound.names))
    return decoder.with_operations(with_options(decoder.operations, sound))


def _sound_options(
    decoder: Decoder, worker: WorkerConfig, length: int, wanted: GpuOptions, problems: dict[str, str]
) -> GpuOptions:
    """Returns all wanted options if they together change no bit. Otherwise, tries to add one option after another."""
    check = OptionCheck(decoder, worker, length)
    if not check.problem(wanted):
        return wanted
    sound = NO_OPTIONS
    for name in wanted.names:
        tried = replace(sound, **{name: True}).on(decoder.weights.embed.device)  # type: ignore[arg-type]
        if problem := check.problem(tried):
            problems[name] = problem
        else:
            sound = tried
    return sound


class OptionCheck:
    """Runs dummy steps of a decoder with a small cache of random keys and values, and compares their logits."""

    def __init__(self, decoder: Decoder, worker: WorkerConfig, length: int) -> None:
        self._decoder, self._device = decoder, decoder.weights.embed.device
        self._size, self._most = page_size(length, worker), min(length, worker.max_step_tokens)
        counts = [
            (-(-(start + min(more, self._most)) // self._size) + 1) * len(starts)
            for starts, more in STEPS + LONG_PROMPT
            for start in starts
        ]
        dtype = decoder.weights.embed.dtype
        self._cache = KVCache(
            decoder.spec, (1 + max(counts),), self._size, kv_format(worker.kv_cache_dtype, dtype), self._device,
            state_slots=1 + 2 * max(len(starts) for starts, _ in STEPS), state_dtype=dtype,
        )  # fmt: skip
        self._capture: Capture = cuda_capture() if self._device.type == "cuda" else EagerGraph
        self._length = length

    @torch.inference_mode()
    def problem(self, options: GpuOptions) -> str:
        """Returns how the steps with these options differ from steps without options, or "" if none differs."""
        self._fill_cache()
        operations = with_options(self._decoder.operations, options)
        forward = self._decoder.with_operations(operations).forward
        try:
            for inputs in self._steps(STEPS + LONG_PROMPT if options.softmax_overlap else STEPS):
                if wrong := self._wrong_replays(inputs, lambda step: forward(step, self._cache)):
                    return f"{wrong} of {REPLAYS} replays of a step of {len(inputs.token_ids)} rows have other bits"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"a step fails: {type(error).__name__}: {error}"[:200]
        return ""

    def _wrong_replays(self, inputs: ForwardInputs, forward: Callable[[ForwardInputs], Tensor]) -> int:
        vocab = self._decoder.spec.vocab_size
        tokens = [inputs.token_ids.clone(), (inputs.token_ids * 3 + 1) % vocab]
        expected = []
        for each in tokens:
            inputs.token_ids.copy_(each)
            expected.append(self._decoder.forward(inputs, self._cache).clone())
        logits = forward(inputs).clone()  # compiles the kernels before the capture
        graph = self._capture(lambda: logits.copy_(forward(inputs)))
        wrong = 0
        for number in range(REPLAYS):
            inputs.token_ids.copy_(tokens[number % 2])
            logits.fill_(torch.nan)
            graph.replay()
            wrong += not torch.equal(logits.view(torch.int32), expected[number % 2].view(torch.int32))
        return wrong

    def _fill_cache(self) -> None:
        generator = torch.Generator(self._device).manual_seed(0)
        for layer in (layer for part in (*self._cache.k, *self._cache.v) for layer in part):
            layer.copy_(torch.randn(layer.shape, generator=generator, device=self._device))

    def _steps(self, steps: Steps) -> Iterator[ForwardInputs]:
        for starts, more in steps:
            page, chunks = 1, []
            for number, start in enumerate(starts):
                count = min(more, self._most) if number == 0 else 1
                chunk = self._chunk(number, min(start, self._length - count), count, page)
                page += len(chunk.sequence.pages[0])
                chunks.append(chunk)
            yield build_inputs(chunks, self._size, self._device, recurrent=bool(self._cache.states))[0]

    def _chunk(self, number: int, start: int, length: int, first_page: int) -> Chunk:
        tokens = [(7919 * (number + 3 * at) + 11) % self._decoder.spec.vocab_size for at in range(start + length)]
        pages = array("i", range(first_page, first_page - (-len(tokens) // self._size)))
        sequence = Sequence(
            (b"", number), tokens, len(tokens), Sampling(1), number, pages=[pages],
            states=SequenceStates({start: 2 * number + 1}, [2 * number + 2]),
        )  # fmt: skip
        return Chunk(sequence, start, length, True)


# Finds before serving the matrix products that the vendor's library computes with the same bits as our kernels
# (--gpu-options library_products).
#
# A weight of each shape and format is multiplied by random rows, for several numbers of rows: powers of two, three
# times these, and the sizes of the largest steps. From then on, the library computes a product only if its bits were
# equal to ours, and if the first row had the same bits as when it is computed alone.

OPTION = "library_products"
MOST_HEAD_ROWS = 512  # the maximum rows to compare for the output head, because a step computes few rows of logits
ANY = 1 << 62
Multiply = Callable[..., Tensor]


def with_cublas_where_equal(decoder: Decoder, worker: WorkerConfig) -> Decoder:
    """Returns the decoder. With `library_products`, the library computes the products for which its bits equal ours."""
    if OPTION not in words(worker.gpu_options) or worker.kernels == "torch":
        return decoder
    return with_checked_cublas(decoder, row_counts(worker.max_step_tokens, worker.prefill_chunk_size))


def with_checked_cublas(decoder: Decoder, counts: Iterable[int]) -> Decoder:
    """Returns a decoder in which the library computes products of `counts` rows if our kernels give the same bits."""
    shapes, counts, problems = list(_shapes(decoder.weights)), sorted(counts), dict[Product, str]()
    if not shapes:
        return decoder
    for name, value in SCARCE.items():
        os.environ.setdefault(name, value)
    for packed, most in shapes:
        for product, problem in compare(packed, [count for count in counts if fewest_rows(packed) <= count <= most]):
            problems[product] = problems.get(product, "") or problem
    equal = frozenset(product for product, problem in problems.items() if not problem)
    others = {f"{one.columns} x {one.depth} {problem}": None for one, problem in problems.items() if problem}
    log.info(
        "the library computes %d products of many rows, with the bits of our kernels%s",
        len(equal), f"; not those of weights {', '.join(others)}" if others else "",
    )  # fmt: skip
    return decoder.with_operations(with_cublas(decoder.operations, equal))


def with_cublas(operations: Operations, equal: frozenset[Product]) -> Operations:
    """Returns operations that let the library compute the products in `equal`."""
    if not equal:
        return operations
    linear = partial(linear_with_cublas, operations.linear, equal)
    gated = partial(gated_linear_with_cublas, operations.gated_linear, equal)
    return replace(operations, linear=linear, gated_linear=gated)


def row_counts(*largest: int) -> set[int]:
    """Returns the numbers of rows to compare: the numbers in `largest`, and powers of two and three times powers of two
    up to the largest of them.
    """
    most = max(largest)
    between = {factor << exponent for exponent in range(most.bit_length()) for factor in (1, 3)}
    return {count for count in between | {*largest} if FEWEST_ROWS <= count <= most}


@torch.inference_mode()
def compare(
    packed: PackedLinear, counts: list[int], ours: Multiply = linear, library: Multiply = cublas_linear
) -> Iterator[tuple[Product, str]]:
    """Yields each product of a weight with `counts` rows, and why the library must not compute it ("" if it may)."""
    device, dtype = packed.weight.device, packed.weight.dtype
    depth = product_of(packed.weight, packed).depth
    generator = torch.Generator(device).manual_seed(0)
    for rows in counts:
        x = torch.randn(rows, depth, generator=generator, device=device).to(dtype)
        yield product_of(x, packed), _problem(x, packed, ours, library)


def _problem(x: Tensor, packed: PackedLinear, ours: Multiply, library: Multiply) -> str:
    try:
        for wide in (False, True):
            alone, expected = (ours(rows, packed, fp32_out=wide) for rows in (x[:1], x))
            weight = weight_of_numbers(packed, x.dtype)
            found = library(x, weight, packed.bias, fp32_out=wide, whole_rows=packed.whole_rows)
            if not same_bits(found, expected):
                return "has other bits"
            if not same_bits(found[:1], alone):
                return "gives a row other bits than alone"
    except Exception as error:
        return f"fails ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]})"
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _shapes(weights: Weights) -> Iterator[tuple[PackedLinear, int]]:
    """Yields one weight of each shape, and the maximum number of rows that it is multiplied by."""
    of_layers = (packed for layer in weights.layers for packed in layer.linears if isinstance(packed, PackedLinear))
    seen: set[tuple[object, ...]] = set()
    for packed, most in (*((packed, ANY) for packed in of_layers), (weights.head, MOST_HEAD_ROWS)):
        if not can_use_cublas(packed):
            continue
        shape = product_of(packed.weight, packed), packed.whole_rows, packed.bias is None, most
        if shape not in seen:
            seen.add(shape)
            yield packed, most


# Checks before serving that, on this device, the bits of a row do not depend on other rows (batch invariance).
#
# All kernels are designed for this. But they rely on matrix instructions that add in the same order for every tile
# size, and no maker of GPUs guarantees this order. The check therefore runs a sequence through the first layers of
# the loaded model in several ways: alone and with others, in one chunk, in several chunks, and as a decode. Its
# logits, K/V and recurrent states must have the same bits every time.

LENGTH = 1219  # tokens of the sequence: enough that attention splits the keys several times
LEAST_LAYERS = 2  # the K/V of the second layer depends on everything that the first layer computes
BESIDE_DECODES = (16, 64)  # numbers of rows in a step of decodes
BESIDE_CHUNK = (17, 65, 129)  # numbers of rows in a step with one decode and a prompt chunk


def keeps_bits(decoder: Decoder, worker: WorkerConfig, length: int, device: str) -> bool:
    """Whether a request gets the same bits in every kind of step that the check tries. Logs one warning if not.

    length: the length of the longest sequence. device: the name of the GPU.
    """
    if decoder.operations is TORCH or not worker.batch_invariant:
        return False
    try:
        differing = find_differing_steps(decoder, worker, length)
    except Exception as error:
        log.warning(
            "cannot check on %s whether an answer depends on what else is computed, so it may (%s)",
            device, summary(error),
        )  # fmt: skip
        return False
    if differing:
        log.warning(
            "ANSWERS MAY DEPEND ON THE LOAD: on %s a row has other bits %s. They are as exact as ever, but the same "
            "request may get another answer when other requests are computed beside it", device, ", ".join(differing),
        )  # fmt: skip
    return not differing


@torch.inference_mode()
def find_differing_steps(decoder: Decoder, worker: WorkerConfig, length: int) -> list[str]:
    """Returns the kinds of steps in which a sequence gets other bits than when it is computed alone in one chunk."""
    limits = StepLimits.of(worker, length)
    small = first_layers(decoder, min(length, LENGTH), decoder.operations, LEAST_LAYERS)
    kinds = [(LENGTH, GREEDY), (max(BESIDE_CHUNK) - 1, GREEDY), *[(1, GREEDY)] * (max(BESIDE_DECODES) - 1)]
    sequences = sequences_of(kinds, limits, decoder.spec.vocab_size)
    cache = cache_for(sequences, small, worker, limits.page_size)
    variants = _Variants(small, cache, limits, sequences[0], sequences[1], sequences[2:])
    alone = variants.run([], [])
    return [name for name, cuts, beside in variants.kinds() if not _same(variants.run(cuts, beside), alone)]


@dataclass(frozen=True, slots=True)
class _Variants:
    """Computes the sequence `one` in several ways, with `prompt` and `shorts` as other sequences in its steps."""

    decoder: Decoder
    cache: KVCache
    limits: StepLimits
    one: Sequence
    prompt: Sequence
    shorts: list[Sequence]

    def kinds(self) -> Iterator[tuple[str, list[int], list[Chunk]]]:
        """Yields each way: its name, the positions that cut the sequence into chunks, other chunks of its last step."""
        length = len(self.one.tokens)
        yield "when it is computed again", [], []
        yield "in several chunks", [1, length // 5, length // 5 + 1, length - 7], []
        yield "as a decode", [length - 1], []
        most = min(self.limits.sequences, self.limits.tokens)
        for rows in sorted({min(rows, most) for rows in BESIDE_DECODES} - {1}):
            others = [Chunk(short, 0, 1, True) for short in self.shorts[: rows - 1]]
            yield f"as a decode beside {rows - 1} others", [length - 1], others
        most = min(self.limits.tokens, len(self.prompt.tokens) + 1)
        for rows in sorted({min(rows, most) for rows in BESIDE_CHUNK} - {1}):
            others = [Chunk(self.prompt, 0, rows - 1, True)]
            yield f"as a decode beside {rows - 1} tokens of a prompt", [length - 1], others
            yield f"as a chunk beside {rows - 1} tokens of a prompt", [length - min(length, 40)], others

    def run(self, cuts: list[int], others: list[Chunk]) -> list[Tensor]:
        """Computes `one` from its start. Returns its logits, K/V and states. others: further chunks of the last step"""
        for sequence in (self.one, self.prompt, *self.shorts):
            sequence.computed_tokens = 0
            states = slots_of(sequence)
            states.free += states.at.values()
            states.at.clear()
        length = len(self.one.tokens)
        ends = sorted({*(cut for cut in cuts if 0 < cut < length), *range(0, length, self.limits.tokens), length} - {0})
        for end in ends:
            last = others if end == length else []
            logits = self._step(Chunk(self.one, self.one.computed_tokens, end - self.one.computed_tokens, True), last)
        return [logits, *self._kept()]

    def _step(self, own: Chunk, others: list[Chunk]) -> Tensor:
        """Computes a step, with `own` between decodes and prompts. Returns the logits [vocab] of `own`."""
        after = [chunk for chunk in others if chunk.sequence is self.prompt]
        chunks = [*(chunk for chunk in others if chunk.sequence is not self.prompt), own, *after]
        inputs, _ = build_inputs(chunks, self.limits.page_size, self.cache.device, recurrent=bool(self.cache.states))
        logits = self.decoder.forward(inputs, self.cache)[chunks.index(own)].clone()
        for chunk in chunks:
            advance(chunk)
        return logits

    def _kept(self) -> Iterator[Tensor]:
        """Yields the K/V of the sequence in all layers, and its recurrent states."""
        one = self.one
        pages = to_device(np.array(one.pages[0], np.int64), self.cache.device)
        for part in (*self.cache.k, *self.cache.v):
            yield part.view(torch.uint8)[:, pages].flatten(1, 2)[:, : len(one.tokens)]
        for state in self.cache.states.values():
            yield state.tail[slots_of(one).at[len(one.tokens)]].clone()
            yield state.memory[slots_of(one).at[len(one.tokens)]].clone()


def _same(bits: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(bits, expected, strict=True)
    )
