"""What stages of a pipeline send besides the rows: hidden states for drafters, vectors of layers, loads of experts.

Outputs of inner layers that a drafter on rank 0 reads (ForwardInputs.aux_hidden_states), in pipeline parallelism.

The first stage has its outputs in the process that reads them. Every other stage hands on those of its own
layers to the next stage, as more columns of the rows, in the order of the layers. They come back to rank 0 with the
result of the last stage.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.per_layer_embeddings import vectors_of_layers
from worker.models.sharding import Part, Stage
from worker.spec import ModelSpec

AuxHiddenStates = Sequence[tuple[int, Tensor]]  # see ForwardInputs.aux_hidden_states


@dataclass(frozen=True, slots=True)
class StageAuxStates:
    """The layers of a step whose outputs are read, for one stage.

    like: a tensor [..., H] with the dtype of the residual stream
    """

    aux_hidden_states: AuxHiddenStates
    stage: Stage
    like: Tensor

    def apart(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Divides the columns of rows from the previous stage: returns the residual stream (and per-layer embeddings),
        and then the outputs of layers [T, N * H].

        N is the number of aux_hidden_states layers in stages between the first one and this one.
        """
        before = _layers(self.aux_hidden_states, self.stage.bounds[1], self.stage.first)
        end = rows.shape[1] - len(before) * self.like.shape[-1]
        return rows[:, :end], rows[:, end:]

    def buffers(self, rows: int) -> dict[int, Tensor]:
        """Returns a tensor [rows, H] for each layer of this stage whose outputs are handed on, by its index here.

        The output of the stage's last layer is the residual stream that the next stage continues.
        """
        stage = self.stage
        own = [layer - stage.first for layer in _layers(self.aux_hidden_states, stage.first, stage.end)]
        own += [] if stage.is_last else [len(stage) - 1]
        return {index: self.like.new_empty(rows, self.like.shape[-1]) for index in own}

    def onward(self, earlier: Tensor | None, outputs: dict[int, Tensor], with_logits: Tensor) -> list[Tensor]:
        """Returns the columns [rows, H] that this stage hands on. The first stage writes its outputs to
        `aux_hidden_states`.

        earlier: outputs of the stages before; None for the first stage. outputs: the filled `buffers`.
        with_logits: the indices of the rows that are read. The last stage has computed and hands on only these.
        """
        stage = self.stage
        if earlier is None:
            for layer, into in self.aux_hidden_states:
                if layer < stage.end:
                    into.copy_(outputs[layer][with_logits])
            return []
        own = [outputs[layer - stage.first] for layer in _layers(self.aux_hidden_states, stage.first, stage.end)]
        return [earlier[with_logits] if stage.is_last else earlier, *own]


def write_returned(rows: Tensor, aux_hidden_states: AuxHiddenStates, first: Stage) -> Tensor:
    """Writes the outputs of later stages to `aux_hidden_states`. Returns the other rows, the result of Decoder.hidden.

    rows: what the last stage has sent to rank 0. first: the first stage.
    """
    later = _layers(aux_hidden_states, first.end, first.bounds[-1])
    if not later:
        return rows
    result, *outputs = rows.chunk(1 + len(later), dim=1)
    by_layer = dict(aux_hidden_states)
    for layer, output in zip(later, outputs, strict=True):
        by_layer[layer].copy_(output)
    return result.contiguous()


def _layers(aux_hidden_states: AuxHiddenStates, first: int, end: int) -> list[int]:
    return sorted(layer for layer, _ in aux_hidden_states if first <= layer < end)


def joined(columns: Sequence[Tensor]) -> Tensor:
    """Returns rows with these columns side by side."""
    return columns[0] if len(columns) == 1 else torch.cat([*columns], dim=1)


# Per-layer embeddings (worker/models/per_layer_embeddings.py) in pipeline parallelism.
#
# The first stage has their table, and computes the vectors of all layers. A stage hands on the vectors of later
# stages together with the residual stream, as further columns of the same rows.


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Divides the vectors of a step between a stage and later stages. decoder: has the layers of the stage

    Without per-layer embeddings, the vectors of later stages are None.
    """

    decoder: Decoder
    stage: Stage

    def begin(self, inputs: ForwardInputs) -> tuple[ForwardInputs, Tensor | None]:
        """Returns the inputs of the first stage with the vectors of its layers, and the vectors of later stages."""
        decoder, weights = self.decoder, self.decoder.weights.per_layer_inputs
        if weights is None:
            return inputs, None
        x = decoder.embedded(inputs)
        return self._divided(inputs, vectors_of_layers(weights, inputs, x, decoder.spec.norm_eps, decoder.operations))

    def take(self, inputs: ForwardInputs, rows: Tensor) -> tuple[ForwardInputs, Tensor | None]:
        """Does the same for another stage. rows: from the previous stage: the residual stream, then the vectors"""
        spec = self.decoder.spec
        stream, vectors = rows[:, : spec.hidden_size].contiguous(), rows[:, spec.hidden_size :]
        inputs = _continued(inputs, stream)
        size = 0 if spec.per_layer_inputs is None else spec.per_layer_inputs.size
        return self._divided(inputs, vectors.reshape(len(rows), -1, size) if size else None)

    def _divided(self, inputs: ForwardInputs, vectors: Tensor | None) -> tuple[ForwardInputs, Tensor | None]:
        if vectors is None:
            return inputs, None
        own = len(self.stage)
        return replace(inputs, of_layers=vectors[:, :own].contiguous()), vectors[:, own:]


def _continued(inputs: ForwardInputs, stream: Tensor) -> ForwardInputs:
    """Returns inputs in which the residual stream of the stage before replaces the embeddings."""
    all_rows = torch.arange(len(stream), device=stream.device)
    return replace(inputs, token_ids=torch.zeros_like(inputs.token_ids), replaced=(all_rows, stream), added=())


# How many rows chose each expert, counted by the stages of a model on one machine (--expert-metrics).
#
# The counts of all layers are in memory that all stages map. Each stage counts the rows of its own layers, and rank 0
# reads all counts. Ranks that share a layer would count the same rows, so only the first of them counts.

ITEM = 8  # bytes of a count


def make_loads(spec: ModelSpec) -> int:
    """Returns a file descriptor of memory for the counts of a model, all zero. spec: of the whole model"""
    memory = os.memfd_create("sluice-experts", os.MFD_CLOEXEC)
    os.ftruncate(memory, max(1, len(spec.layers) * _experts(spec)) * ITEM)
    return memory


def map_loads(memory: int, spec: ModelSpec) -> Tensor:
    """Returns the counts [layers, experts] int64 of the whole model, which other processes read and write, too."""
    shape = len(spec.layers), _experts(spec)
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.int64)[: shape[0] * shape[1]].view(shape)


def own_loads(memory: int, spec: ModelSpec, part: Part) -> Tensor | None:
    """Returns the counts of the layers of a part; None if another rank counts them. spec: of the whole model"""
    if memory < 0 or part.tp_rank:
        return None
    return map_loads(memory, spec)[part.stage.first : part.stage.end]


def _experts(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.count
