"""Checks before serving that the options of --gpu-options change no bit on this GPU.

The options change how kernels wait for one another. A kernel that does not wait long enough reads old values of an
earlier step, but only if kernels follow one another closely. The check therefore captures a few dummy steps of the
whole model as CUDA graphs with the options, and replays each graph many times, with two sets of tokens in turn. All
logits must have the same bits as the step without options and without a graph.
"""

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shared.config import WorkerConfig, words
from shared.messages import Sampling
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions, options_named
from worker.kernels.operations import with_options
from worker.kv_cache.sizing import page_size
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.run.graphs.graph_capture import Capture, EagerGraph, cuda_capture
from worker.run.inputs import build_inputs
from worker.schedule.records.sequence_states import SequenceStates
from worker.schedule.sequence import Chunk, Sequence

log = logging.getLogger("sluice.load")

REPLAYS = 20  # replays of each step
# For each step: how many tokens each sequence has computed before, and how many the first one computes (the others: 1).
Steps = tuple[tuple[tuple[int, ...], int], ...]
STEPS: Steps = (((700,), 1), ((700, 3, 300, 64), 1), ((64, 700, 3), 40))
LONG_PROMPT: Steps = (((300,), 2048),)  # enough rows that the kernel for prefill attention computes them


def with_sound_options(decoder: Decoder, worker: WorkerConfig, length: int) -> Decoder:
    """Returns the decoder with those options of --gpu-options that change no bit. One warning names the other options.

    length: tokens of the longest sequence. Raises torch.OutOfMemoryError.
    """
    device = decoder.weights.embed.device
    asked = replace(options_named(words(worker.gpu_options)), library_products=False)  # see library_check.py
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
