"""Per-layer embeddings (worker/model/layer_inputs.py) in pipeline parallelism.

The first stage has their table, and computes the vectors of all layers. A stage hands on the vectors of later stages
beside the residual stream, as more columns of the same rows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.layer_inputs import vectors_of_layers
from worker.model.parts.stages import Stage


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Divides the vectors of a step between a stage and later stages. decoder: has the layers of the stage

    Without per-layer embeddings, the vectors of later stages are None.
    """

    decoder: Decoder
    stage: Stage

    def begin(self, inputs: ForwardInputs) -> tuple[ForwardInputs, Tensor | None]:
        """Returns the inputs of the first stage with the vectors of its layers, and the vectors of later stages."""
        decoder, weights = self.decoder, self.decoder.weights.layer_inputs
        if weights is None:
            return inputs, None
        x = decoder.embedded(inputs)
        return self._divided(inputs, vectors_of_layers(weights, inputs, x, decoder.spec.norm_eps, decoder.operations))

    def take(self, inputs: ForwardInputs, rows: Tensor) -> tuple[ForwardInputs, Tensor | None]:
        """Does the same for another stage. rows: the residual stream of the stage before, and vectors beside it"""
        spec = self.decoder.spec
        stream, vectors = rows[:, : spec.hidden_size].contiguous(), rows[:, spec.hidden_size :]
        inputs = _continued(inputs, stream)
        size = 0 if spec.layer_inputs is None else spec.layer_inputs.size
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
