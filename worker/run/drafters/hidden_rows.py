"""Gives a draft head the hidden states of the served model that a step computes.

The runner only has a hook for this, `Runner.hidden_reader`, which computes the logits of a step. The logits have the
same bits as without the hook, because the bits of a row do not depend on other rows.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.schedule.sequence import Chunk, Plan, Sequence

CONTEXT = 256  # how many of the last tokens' hidden states are kept; the head does not read the start of long prompts


class Model(Protocol):
    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def logits(self, h: Tensor) -> Tensor: ...


class Reader(Protocol):
    """The interface of `Runner.hidden_reader`."""

    def logits(self, model: Model, inputs: ForwardInputs, plan: Plan, cache: KVCache) -> Tensor:
        """Returns the logits of a step, with the same bits as model.forward."""


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

    def of_step(self, model: Model, inputs: ForwardInputs, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Returns the output of the last norm [R, H], which the next step may overwrite, and hidden states [R, W]."""
        if not self.layers:
            normed = model.hidden(inputs, cache)
            return normed, normed.clone()
        outputs = torch.empty(len(self.layers), len(inputs.logits_indices), self.hidden_size, dtype=self.dtype)
        tapped = tuple(zip(self.layers, outputs, strict=True))
        return model.hidden(replace(inputs, tapped=tapped), cache), outputs.transpose(0, 1).flatten(1)


def logits_and_hidden(
    model: Model, inputs: ForwardInputs, plan: Plan, cache: KVCache, states_of: HiddenStates, read: Read
) -> Tensor:
    """Returns the logits of a step. Calls `read` for each sequence that may have drafts; `read` may keep the tensor."""
    wanted = rows_to_read(plan.chunks)
    rows = [row for first, chunk, skipped in wanted for row in range(first + skipped, first + chunk.length)]
    if inputs.all_logits and len(rows) == len(inputs.token_ids):  # the step has only decodes
        normed, states = states_of.of_step(model, inputs, cache)
        logits = model.logits(normed)
    else:
        at = torch.tensor(rows, dtype=torch.int64)
        indices = torch.unique(torch.cat((inputs.logits_indices, at)))  # ascending
        normed, every = states_of.of_step(model, replace(inputs, logits_indices=indices), cache)
        logits = model.logits(normed[torch.searchsorted(indices, inputs.logits_indices)])
        states = every[torch.searchsorted(indices, at)]
    for (_, chunk, skipped), own in zip(
        wanted, states.split_with_sizes([c.length - s for _, c, s in wanted]), strict=True
    ):
        read(chunk.sequence, chunk.start + skipped, own)
    return logits


def rows_to_read(chunks: Seq[Chunk]) -> list[tuple[int, Chunk, int]]:
    """Returns (first row, chunk, number of rows to skip) for each chunk whose hidden states are read."""
    first, wanted = 0, []
    for chunk in chunks:
        skipped = max(0, len(chunk.sequence.tokens) - CONTEXT - chunk.start)
        if skipped < chunk.length and chunk.sequence.check is None:
            wanted.append((first, chunk, skipped))
        first += chunk.length
    return wanted
