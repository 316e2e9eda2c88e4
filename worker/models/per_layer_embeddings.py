"""Per-layer embeddings (Gemma 4): a vector for each token and layer, from a table and from the token's embedding.

Some names in the code call these vectors the inputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.checkpoint.stored_weight import WEIGHT, PlainWeight, ReadTensor, StackedLinear, StoredWeight, WeightSource
from worker.models.forward_inputs import ForwardInputs
from worker.models.layer_kinds import norm_weights
from worker.operations import Operations
from worker.ops.embedding import Embedding
from worker.ops.linear.packed import PackedLinear
from worker.ops.quantized_weight import QuantizedWeight
from worker.spec import ModelSpec

TABLE = "embed_tokens_per_layer"
IN_16_BITS = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The weights that compute the per-layer embeddings of all layers. L: number of layers; P: size of a vector"""

    table: Embedding  # embed_tokens_per_layer [vocab, L * P], in 16 bits if the checkpoint has it in 16 bits
    projection: PackedLinear  # per_layer_model_projection: H → L * P
    norm: Tensor  # per_layer_projection_norm [P]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.projection.nbytes


@dataclass(frozen=True, slots=True)
class StoredPerLayerInputs:
    """The weights of PerLayerInputs as a checkpoint stores them.

    The table is large, and a step reads only its tokens' rows. Therefore a table stored in 16 bits stays in 16 bits,
    even in a float32 model.
    """

    table: StoredWeight
    projection: StackedLinear
    norm: PlainWeight
    dtype: torch.dtype  # the model's dtype
    kept: torch.dtype  # the table's dtype in memory

    @classmethod
    def of(
        cls, spec: ModelSpec, source: WeightSource, prefix: str, dtype: torch.dtype
    ) -> "StoredPerLayerInputs | None":
        """Returns a checkpoint's weights; None if the model has none. prefix: the prefix of its tensor names"""
        inputs = spec.per_layer_inputs
        if inputs is None:
            return None
        width = len(spec.layers) * inputs.size
        table, kept = source.weight(f"{prefix}{TABLE}{WEIGHT}", (inputs.vocab_size, width)), dtype
        if table.layout is None and dtype == torch.float32 and table.name in source.tensors:
            kept = IN_16_BITS.get(source.tensors.format(table.name), dtype)
        return cls(
            table,
            StackedLinear(("per_layer_model_projection",), (width,), spec.hidden_size, False),
            PlainWeight(f"{prefix}per_layer_projection_norm{WEIGHT}", (inputs.size,)),
            dtype,
            kept,
        )

    @property
    def spared(self) -> int:
        """How many bytes are saved because the table is not in the model's dtype."""
        return torch.Size(self.table.shape).numel() * (self.dtype.itemsize - self.kept.itemsize)

    def read_table(self, read: ReadTensor) -> Tensor:
        table = self.table.read(read, self.kept)
        return table.dequantize(self.kept) if isinstance(table, QuantizedWeight) else table


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """The weights that add a layer's per-layer embedding to its output. Comments begin with Hugging Face's names."""

    gate: PackedLinear  # per_layer_input_gate: H → P
    out: PackedLinear  # per_layer_projection: P → H
    norm: Tensor  # post_per_layer_input_norm


def own_linears(spec: ModelSpec) -> dict[str, StackedLinear]:
    """Returns the linears of PerLayerInput by field name; an empty dict if the model has no per-layer embeddings."""
    if spec.per_layer_inputs is None:
        return {}
    size, hidden = spec.per_layer_inputs.size, spec.hidden_size
    return {
        "gate": StackedLinear(("per_layer_input_gate",), (size,), hidden, False),
        "out": StackedLinear(("per_layer_projection",), (hidden,), size, False),
    }


def own_norm(spec: ModelSpec, prefix: str) -> Sequence[PlainWeight]:
    """Returns the stored tensors of PerLayerInput's norm, if it has one. prefix: of the layer's tensor names"""
    module = f"{prefix}post_per_layer_input_norm"
    return () if spec.per_layer_inputs is None else norm_weights(spec, module, spec.hidden_size)


def add_vectors(
    h: Tensor, x: Tensor, inputs: ForwardInputs, index: int, norm: Tensor | None, do: Operations, spec: ModelSpec
) -> None:
    """After layer `index`, adds inputs.added[index] to the replaced rows of x [T, H], and norms them into h [T, H].

    Changes x and h in place.
    """
    assert inputs.replaced is not None
    rows, vectors = inputs.replaced[0], inputs.added[index]
    h[rows], x[rows] = do.add_rms_norm(vectors, x[rows], norm, spec.norm_eps, offset=spec.norm_offset)


def write_aux_hidden_states(x: Tensor, inputs: ForwardInputs, index: int, *, all_rows: bool) -> None:
    """Writes the outputs x of layer `index` to the tensors that inputs.aux_hidden_states has for this layer.

    all_rows: if true, x has all rows of the step, else only the rows with logits
    """
    for layer, into in inputs.aux_hidden_states:
        if layer == index:
            into.copy_(x[inputs.logits_indices] if all_rows else x)


def add_per_layer_input(x: Tensor, vector: Tensor, own: PerLayerInput, spec: ModelSpec, do: Operations) -> Tensor:
    """Projects a layer's per-layer embeddings `vector` [T, P], gated by x [T, H], and returns their sum with x."""
    gated = do.act_and_mul(torch.cat((do.linear(x, own.gate), vector), dim=1), spec.activation)
    added = do.linear(gated, own.out, split_k=True)
    return do.add_rms_norm(added, x, None, spec.norm_eps, offset=spec.norm_offset, x_norm=own.norm)[1]


def in_c(own: PerLayerInput) -> dict[str, Any]:
    """Returns the fields of DecoderCLayer for these weights."""
    return {"input_gate": own.gate.cpu, "input_out": own.out.cpu, "after_input": own.norm}


def vectors_of_layers(
    weights: PerLayerInputs | None, inputs: ForwardInputs, x: Tensor, eps: float, do: Operations
) -> Tensor | None:
    """Returns the per-layer embeddings [T, L, P]; None if the model has none. x [T, H]: the scaled embeddings"""
    if weights is None or inputs.of_layers is not None:
        return inputs.of_layers
    size = len(weights.norm)
    scale = torch.tensor(size**0.5).to(x.dtype).item()  # the scale is rounded as in training
    of_tokens = weights.table.rows(inputs.token_ids).to(x.dtype).view(len(x), -1, size) * scale
    of_context = (do.linear(x, weights.projection) * x.shape[1] ** -0.5).view(len(x), -1, size)
    return (do.rms_norm(of_context, weights.norm, eps) + of_tokens) * 2**-0.5
