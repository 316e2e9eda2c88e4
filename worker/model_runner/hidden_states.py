"""Gives a draft head the hidden states of the served model that a step computes.

The runner only has a hook for this, `Runner.hidden_reader`, which says how a step is computed. The logits have the same
bits as without the hook, because the bits of a row do not depend on other rows.

A captured step writes the hidden states of all its rows to memory at a fixed address (CapturedStates), from which one
copy takes the rows that are read. Other steps return them (ReadStep).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.model_runner.inputs import prepare_batch, to_device
from worker.models.forward_inputs import Forward, ForwardInputs
from worker.scheduler.sequence import Chunk, Plan, Sequence

CONTEXT = 256  # how many of the last tokens' hidden states are kept; the head does not read the start of long prompts


class Reader(Protocol):
    """The interface of `Runner.hidden_reader`."""

    def reads(self, inputs: ForwardInputs, plan: Plan) -> "ReadStep | None":
        """Returns how a step is computed so that its hidden states are read; None if it is computed as any other."""

    def captured(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes a step whose inputs and outputs are at fixed addresses. Returns its logits."""

    def replayed(self, plan: Plan) -> None:
        """Reads the hidden states of the last step that captured() computed, or a replay of it."""


Read = Callable[[Sequence, int, Tensor], None]  # (sequence, position of the first row, hidden states [N, W])


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Which hidden states of the served model a drafter reads: the outputs of some layers, side by side.

    layers: the indices of these layers; empty: the output of the last norm. hidden_size, dtype: the served model's.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """W, the size of the hidden state of a token."""
        return self.hidden_size * (len(self.layers) or 1)

    def of_step(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Returns the output of the last norm [R, H], which the next step may overwrite, and hidden states [R, W]."""
        aux_hidden_states, outputs = self.aux_hidden_states(inputs)
        normed = model.hidden(aux_hidden_states, cache)
        return normed, states_in(normed, outputs)

    def aux_hidden_states(self, inputs: ForwardInputs) -> tuple[ForwardInputs, Tensor | None]:
        """Returns inputs with which the model writes the outputs of the layers to a tensor [L, R, H], and this tensor.

        The tensor is None if the hidden states are the output of the last norm.
        """
        if not self.layers:
            return inputs, None
        shape = len(self.layers), len(inputs.logits_indices), self.hidden_size
        outputs = torch.empty(shape, dtype=self.dtype, device=inputs.positions.device)
        return replace(inputs, aux_hidden_states=tuple(zip(self.layers, outputs, strict=True))), outputs


def states_in(normed: Tensor, outputs: Tensor | None) -> Tensor:
    """Returns the hidden states [R, W] of a step. outputs: see HiddenStates.aux_hidden_states"""
    return normed.clone() if outputs is None else outputs.transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step whose hidden states are read.

    inputs: those with which the model computes the step: all rows that are read have logits, too.
    outputs: see HiddenStates.aux_hidden_states. with_logits, read_rows: the indices of the rows whose logits are
    returned, and of those that are read, among the rows of the model's output; None: all rows.
    wanted: see rows_to_read
    """

    inputs: ForwardInputs
    outputs: Tensor | None
    with_logits: Tensor | None
    read_rows: Tensor | None
    wanted: list[tuple[int, Chunk, int]]
    read: Read

    def logits(self, model: Forward, cache: KVCache) -> Tensor:
        """Computes the step, and returns its logits. Gives hidden states to `read`, which may keep the tensor."""
        normed = model.hidden(self.inputs, cache)
        every = states_in(normed, self.outputs)
        logits = model.logits(normed if self.with_logits is None else normed[self.with_logits])
        states = every if self.read_rows is None else every[self.read_rows]
        for (_, chunk, skipped), own in zip(
            self.wanted, states.split_with_sizes([c.length - s for _, c, s in self.wanted]), strict=True
        ):
            self.read(chunk.sequence, chunk.start + skipped, own)
        return logits


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A model that computes one step, whose hidden states are read. It has the interface of Forward."""

    model: Forward
    step: ReadStep

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.step.logits(self.model, cache)

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self.model.hidden(self.step.inputs, cache)

    def logits(self, h: Tensor) -> Tensor:
        return self.model.logits(h)


def read_step(inputs: ForwardInputs, plan: Plan, states_of: HiddenStates, read: Read) -> ReadStep:
    """Returns a step that calls `read` for each sequence that may have drafts."""
    wanted = rows_to_read(plan.chunks)
    rows = [row for first, chunk, skipped in wanted for row in range(first + skipped, first + chunk.length)]
    if inputs.all_logits and len(rows) == len(inputs.token_ids):  # the step has only decodes
        return ReadStep(*states_of.aux_hidden_states(inputs), None, None, wanted, read)
    device = inputs.logits_indices.device
    on_gpu = device.type == "cuda"  # then the host lays the step out again, because reading the indices would wait
    with_logits = prepare_batch(plan.chunks, 1)[0].logits_indices if on_gpu else inputs.logits_indices.numpy()
    at = np.array(rows, np.int64)
    indices = np.union1d(with_logits, at)  # ascending
    more, outputs = states_of.aux_hidden_states(replace(inputs, logits_indices=to_device(indices, device)))
    of_logits, of_states = (to_device(np.searchsorted(indices, each), device) for each in (with_logits, at))
    return ReadStep(more, outputs, of_logits, of_states, wanted, read)


class CapturedStates:
    """The hidden states of the last captured step, at a fixed address that the steps of all shapes share.

    A captured step computes all its rows up to the last norm, so that its size does not depend on which are read.
    """

    def __init__(
        self, states: HiddenStates, rows: int, device: torch.device, features: Callable[[Tensor], Tensor], width: int
    ) -> None:
        """rows: the most tokens of a captured step. features: makes the vectors [T, width] that are kept from hidden
        states [T, W]
        """
        self._states, self._features = states, features
        self._memory = torch.zeros(rows, width, dtype=states.dtype, device=device)
        self._rows = torch.arange(rows, device=device)

    def logits(self, model: Forward, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes a step, and returns its logits [R, vocab]. Never waits for the device."""
        count = len(inputs.token_ids)
        every = replace(inputs, logits_indices=self._rows[:count], any_rows=False)
        aux_hidden_states, outputs = self._states.aux_hidden_states(every)
        normed = model.hidden(aux_hidden_states, cache)
        states = normed if outputs is None else states_in(normed, outputs)
        self._memory[:count].copy_(self._features(states))
        return model.logits(normed if inputs.all_logits else normed[inputs.logits_indices])

    def read(self, plan: Plan, read: Read) -> None:
        """Gives the vectors of a step's tokens to `read`, in a copy that later steps do not overwrite."""
        wanted = rows_to_read(plan.chunks)
        if wanted:
            parts = [self._memory[first + skipped : first + chunk.length] for first, chunk, skipped in wanted]
            copies = torch.cat(parts).split_with_sizes([len(part) for part in parts])
            for (_, chunk, skipped), own in zip(wanted, copies, strict=True):
                read(chunk.sequence, chunk.start + skipped, own)


def rows_to_read(chunks: Seq[Chunk]) -> list[tuple[int, Chunk, int]]:
    """Returns (first row, chunk, number of rows to skip) for each chunk whose hidden states are read."""
    first, wanted = 0, []
    for chunk in chunks:
        skipped = max(0, len(chunk.sequence.tokens) - CONTEXT - chunk.start)
        if skipped < chunk.length and chunk.sequence.check is None:
            wanted.append((first, chunk, skipped))
        first += chunk.length
    return wanted
