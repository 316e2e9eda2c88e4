"""The forward pass of a tower and its connector: turns one image into vectors of the text model's width.

Each image is encoded alone, by operations that give a row the same bits with any number of threads. So its vectors
depend only on its pixels.

An image is encoded in pieces, so that a worker can compute steps between them. A piece is some rows of a layer. The
bits of a row do not depend on how rows are divided into pieces.
"""

from collections.abc import Generator, Sequence
from ctypes import c_uint64
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from shared.messages import PromptImage
from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
from worker.vision.activations import activated_linear, gated, gated_linear
from worker.vision.attention import (
    ATTENTION_COST,
    ROWS,
    Queries,
    Windows,
    by_axes,
    in_windows,
    resized,
    rotary_tables,
    stretched,
)
from worker.vision.connectors import CONNECTORS, ConnectorWeights, level_table, patches_of
from worker.vision.spec import VisionSpec

# Layers of Gemma 4: attention and the MLP each have a norm before and after them, as in Gemma's text models.
#
# Heads of queries, keys and values are normed; scores are not scaled; inputs and outputs of linears may be clamped.


@dataclass(frozen=True, slots=True)
class ClampedLinear:
    """A linear whose inputs and outputs are clamped to these ranges."""

    linear: PackedLinear
    inputs: tuple[float, float] = (-inf, inf)
    outputs: tuple[float, float] = (-inf, inf)

    def of(self, x: Tensor, do: Operations) -> Tensor:
        return _clamped(do.linear(_clamped(x, self.inputs), self.linear), self.outputs)


def _clamped(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    return x if bounds == (-inf, inf) else x.clamp(*bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichLayer:
    """The weights of a layer. All norms are RMS norms: [H], and [D] for heads."""

    before_attention: Tensor
    q: ClampedLinear
    k: ClampedLinear
    v: ClampedLinear
    q_norm: Tensor
    k_norm: Tensor
    v_norm: Tensor  # ones
    o: ClampedLinear
    after_attention: Tensor
    before_mlp: Tensor
    gate: ClampedLinear
    up: ClampedLinear
    down: ClampedLinear
    after_mlp: Tensor

    def forward(
        self, norm: Tensor | None, h: Tensor, x: Tensor, seen: Windows, tables: tuple[Tensor, Tensor] | None,
        spec: VisionSpec, do: Operations,
    ) -> Generator[int, None, tuple[Tensor, Tensor]]:  # fmt: skip
        """Does what EncoderLayer.forward does."""
        parts = [slice(first, min(first + ROWS, len(h))) for first in range(0, len(h), ROWS)]
        heads = (self.q, self.q_norm), (self.k, self.k_norm), (self.v, self.v_norm)
        head, eps = spec.hidden_size // spec.heads, spec.norm_eps
        qkv = []
        for part in parts:
            found = (do.rms_norm(each.of(h[part], do).view(-1, head), weight, eps) for each, weight in heads)
            qkv.append(torch.cat([each.view(-1, spec.hidden_size) for each in found], dim=1))
            yield 3 * h[part].numel() * spec.hidden_size
        queries = Queries.of(torch.cat(qkv), spec.heads, seen, do, tables, scale=1.0)
        normed, streams = [], []
        for part in parts:
            mixed = self.o.of(queries.attend(part, do), do)
            mixed, stream = do.add_rms_norm(mixed, x[part], self.before_mlp, eps, x_norm=self.after_attention)
            wide = torch.cat([self.gate.of(mixed, do), self.up.of(mixed, do)], dim=1)
            down = self.down.of(gated(wide, spec.activation, do), do)
            mixed, stream = do.add_rms_norm(down, stream, norm, eps, x_norm=self.after_mlp)
            normed.append(mixed)
            streams.append(stream)
            linears = spec.hidden_size + 3 * spec.intermediate_size
            yield stream.numel() * (2 * ATTENTION_COST * max(seen.lengths) + linears)
        return torch.cat(normed), torch.cat(streams)


Tables = tuple[Tensor, Tensor]  # cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    """The weights of a layer. H: hidden size. Norms [2, H] are layer norms with weight and bias; [H]: RMS norms."""

    before_attention: Tensor
    qkv: PackedLinear
    o: PackedLinear
    before_mlp: Tensor
    up: PackedLinear  # H → I; with a gate H → 2 I
    down: PackedLinear

    def forward(
        self, norm: Tensor | None, h: Tensor, x: Tensor, seen: Windows, tables: Tables | None, spec: VisionSpec,
        do: Operations,
    ) -> Generator[int, None, tuple[Tensor, Tensor]]:  # fmt: skip
        """Returns the normed rows for the next layer and the residual stream. Yields the costs of pieces.

        norm: the first norm of the next layer
        h, x [N, H]: the normed rows and the residual stream of this layer
        seen: the windows of rows that attend to each other
        """
        eps = spec.norm_eps
        parts = [slice(first, min(first + ROWS, len(h))) for first in range(0, len(h), ROWS)]
        qkv = []
        for part in parts:
            qkv.append(do.linear(h[part], self.qkv))
            yield 3 * h[part].numel() * spec.hidden_size
        queries = Queries.of(torch.cat(qkv), spec.heads, seen, do, tables)
        normed, streams = [], []
        for part in parts:
            mixed, stream = do.linear_add_norm(queries.attend(part, do), self.o, x[part], self.before_mlp, eps)
            widened = gated_linear if spec.gated else activated_linear
            wide = widened(mixed, self.up, spec.activation, do)
            mixed, stream = do.linear_add_norm(wide, self.down, stream, norm, eps)
            normed.append(mixed)
            streams.append(stream)
            linears = spec.hidden_size + (3 if spec.gated else 2) * spec.intermediate_size
            yield stream.numel() * (2 * ATTENTION_COST * max(seen.lengths) + linears)
        return torch.cat(normed), torch.cat(streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWeights:
    """patches: the convolution over patches as a linear

    positions [P, H]: an embedding for each patch, or a grid to stretch; [2, P, H]: by column and by row; None: there
    are none
    norm: the norm after the last layer; None: there is none
    first_norm [H]: an RMS norm of the patches before the first layer
    """

    patches: PackedLinear
    positions: Tensor | None
    layers: Sequence[EncoderLayer | SandwichLayer]
    norm: Tensor | None
    connector: ConnectorWeights
    deepstack: list[ConnectorWeights]  # connectors after the layers of VisionSpec.deepstack
    first_norm: Tensor | None = None

    def encoder(self, spec: VisionSpec, operations: Operations, started: c_uint64) -> "Encoder":
        """Returns an encoder with these weights. started: see Encoder"""
        return Encoder(spec, self, operations, started)


class Encoder:
    """A tower that is ready to run."""

    def __init__(self, spec: VisionSpec, weights: EncoderWeights, operations: Operations, started: c_uint64) -> None:
        """started: a counter of computed layers, which shows that a long step makes progress"""
        self.spec, self.weights, self._do, self._started = spec, weights, operations, started
        like = weights.layers[0].before_mlp
        self._table = level_table(spec).to(like.device).to(like.dtype)

    @torch.inference_mode()
    def encode(self, image: PromptImage) -> Tensor:
        """Returns the vectors of an image [tokens, text_size]. Vectors for deepstack are further columns."""
        pieces = self.pieces(image)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                found: Tensor = done.value
                return found

    def pieces(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Encodes an image, and yields after each piece its cost in multiplications. Returns the same as `encode`."""
        spec, weights, do = self.spec, self.weights, self._do
        rows, columns = spec.grid_of(image.height, image.width)
        everything, order = Windows((rows * columns,)), None
        windows = everything
        x = do.linear(patches_of(image, spec, self._table), weights.patches)  # [N, H]
        if weights.positions is not None:
            x = x + self._positions(weights.positions, rows, columns)
        if weights.first_norm is not None:
            x = do.rms_norm(x, weights.first_norm, spec.norm_eps)
        tables = self._tables(rows, columns)
        if spec.window:
            order, windows = in_windows(rows, columns, spec.window)
            order = order.to(x.device)
            x, tables = x[order], tables and (tables[0][order], tables[1][order])
        h = do.rms_norm(x, weights.layers[0].before_attention, spec.norm_eps)
        yield x.numel() * spec.patch_width
        norms = [*(layer.before_attention for layer in weights.layers[1:]), weights.norm]
        stack = dict(zip(spec.deepstack, weights.deepstack, strict=True))
        more = []
        for index, (layer, norm) in enumerate(zip(weights.layers, norms, strict=True)):
            self._started.value += 1
            seen = everything if index in spec.whole_layers else windows
            h, x = yield from layer.forward(norm, h, x, seen, tables, spec, do)
            if index in stack:
                more.append(self._connected(x, order, stack[index], image))
        first = self._connected(h, order, weights.connector, image)
        return torch.cat([first, *more], dim=1) if more else first

    def _positions(self, stored: Tensor, rows: int, columns: int) -> Tensor:
        if self.spec.position_axes:
            return by_axes(stored, rows, columns)
        side, found = self.spec.position_side, stretched if self.spec.position_corners else resized
        return found(stored, side, rows, columns).to(stored.dtype) if side else stored

    def _tables(self, rows: int, columns: int) -> Tables | None:
        spec = self.spec
        if not spec.rotary_theta:
            return None
        head_dim, alternate = spec.hidden_size // spec.heads, spec.rotary_alternate
        return rotary_tables(rows, columns, head_dim, spec.rotary_theta, self._table.device, alternate=alternate)

    def _connected(self, x: Tensor, order: Tensor | None, connector: ConnectorWeights, image: PromptImage) -> Tensor:
        """Applies a connector. order: for each row of x, its position in the image; None: rows are in order"""
        spec = self.spec
        if order is not None:
            x = torch.empty_like(x).index_copy_(0, order, x)
        down, across = spec.squares_of(image.height, image.width)
        squares = x.view(down, spec.side, across, spec.side, spec.hidden_size)
        return CONNECTORS[spec.connector](squares, connector, spec, self._do)


# A model without a tower (Gemma 4 12B): a linear turns the pixels of each square of an image into a token.

LAYER_NORM_EPS = 1e-5  # the default of torch's layer norm; configs do not state it


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderWeights:
    """W: the number of values in a square's pixels; H: hidden size. Norms [2, n] are layer norms: weight, bias."""

    pixel_norm: Tensor  # [2, W]
    pixels: PackedLinear  # W → H
    norm: Tensor  # [2, H]
    positions: Tensor  # [2, P, H]: embeddings of columns, and of rows
    last_norm: Tensor  # [2, H]
    projection: PackedLinear  # H → text_size
    ones: Tensor  # [H]: the weight of the RMS norm before the projection

    def encoder(self, spec: VisionSpec, operations: Operations, started: c_uint64) -> "Embedder":
        """Does what EncoderWeights.encoder does."""
        return Embedder(spec, self, operations, started)


class Embedder:
    """Has the interface of Encoder."""

    def __init__(self, spec: VisionSpec, weights: EmbedderWeights, operations: Operations, started: c_uint64) -> None:
        self.spec, self.weights, self._do, self._started = spec, weights, operations, started
        self._squares = replace(spec, patch_size=spec.patch_size * spec.side, side=1)
        self._table = level_table(spec).to(weights.norm.device).to(weights.norm.dtype)

    @torch.inference_mode()
    def encode(self, image: PromptImage) -> Tensor:
        """Returns the vectors of an image, [tokens, text_size]."""
        weights, do = self.weights, self._do
        self._started.value += 1
        x = do.rms_norm(patches_of(image, self._squares, self._table), weights.pixel_norm, LAYER_NORM_EPS)
        x = do.rms_norm(do.linear(x, weights.pixels), weights.norm, LAYER_NORM_EPS)
        rows, columns = self._squares.grid_of(image.height, image.width)
        x = do.rms_norm(x + by_axes(weights.positions, rows, columns), weights.last_norm, LAYER_NORM_EPS)
        return do.linear(do.rms_norm(x, weights.ones, self.spec.norm_eps), weights.projection)

    def pieces(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Encodes an image in one piece, whose cost is about that of its tokens in the text model."""
        found = self.encode(image)
        yield found.numel() * self._squares.patch_width
        return found
