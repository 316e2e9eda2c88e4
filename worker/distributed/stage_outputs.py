"""Outputs of inner layers that a drafter on rank 0 reads (ForwardInputs.tapped), in pipeline parallelism.

The first stage has its outputs in the process that reads them. Every other stage hands on the outputs of its tapped
layers to the next stage, as more columns of the rows, in the order of the layers. They come back to rank 0 with the
result of the last stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.parts.stages import Stage

Tapped = Sequence[tuple[int, Tensor]]  # see ForwardInputs.tapped


@dataclass(frozen=True, slots=True)
class StageTaps:
    """The tapped layers of a step, for one stage. like: a tensor [..., H] with the dtype of the residual stream"""

    tapped: Tapped
    stage: Stage
    like: Tensor

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Divides the rows of the stage before: returns them without outputs of layers, and these outputs [T, N * H].

        N is the number of tapped layers behind the first stage and before this one.
        """
        before = _layers(self.tapped, self.stage.bounds[1], self.stage.first)
        end = rows.shape[1] - len(before) * self.like.shape[-1]
        return rows[:, :end], rows[:, end:]

    def buffers(self, rows: int) -> dict[int, Tensor]:
        """Returns a tensor [rows, H] for each layer of this stage whose outputs are handed on, by its index here.

        The output of the stage's last layer is the residual stream that the next stage continues.
        """
        stage = self.stage
        own = [layer - stage.first for layer in _layers(self.tapped, stage.first, stage.end)]
        own += [] if stage.is_last else [len(stage) - 1]
        return {index: self.like.new_empty(rows, self.like.shape[-1]) for index in own}

    def onward(self, earlier: Tensor | None, outputs: dict[int, Tensor], with_logits: Tensor) -> list[Tensor]:
        """Returns the columns [rows, H] that this stage hands on. The first stage writes its outputs to `tapped`.

        earlier: outputs of the stages before; None for the first stage. outputs: the filled `buffers`.
        with_logits: the indices of the rows that are read. The last stage has computed and hands on only these.
        """
        stage = self.stage
        if earlier is None:
            for layer, into in self.tapped:
                if layer < stage.end:
                    into.copy_(outputs[layer][with_logits])
            return []
        own = [outputs[layer - stage.first] for layer in _layers(self.tapped, stage.first, stage.end)]
        return [earlier[with_logits] if stage.is_last else earlier, *own]


def write_returned(rows: Tensor, tapped: Tapped, first: Stage) -> Tensor:
    """Writes the outputs of later stages to `tapped`. Returns the rest of the rows, the result of Decoder.hidden.

    rows: what the last stage has sent to rank 0. first: the first stage.
    """
    later = _layers(tapped, first.end, first.bounds[-1])
    if not later:
        return rows
    result, *outputs = rows.chunk(1 + len(later), dim=1)
    by_layer = dict(tapped)
    for layer, output in zip(later, outputs, strict=True):
        by_layer[layer].copy_(output)
    return result.contiguous()


def _layers(tapped: Tapped, first: int, end: int) -> list[int]:
    return sorted(layer for layer, _ in tapped if first <= layer < end)


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Returns rows with these columns side by side."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], dim=1)
