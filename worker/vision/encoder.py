"""The forward pass of a tower and its connector: turns one image into vectors of the text model's width.

Each image is encoded alone, by operations that give a row the same bits with any number of threads. So its vectors
depend only on its pixels.

An image is encoded in pieces, so that a worker can compute steps between them. A piece is some rows of a layer. The
bits of a row do not depend on how rows are divided into pieces.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from ctypes import c_uint64
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu

from shared.messages import PromptImage
from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
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
from worker.vision.spec import Connector, VisionActivation, VisionSpec

# The activations of towers and connectors. The activations of text models are kernels; the exact GELU is torch's.

# Torch computes at most this many elements in one thread. It divides more elements among threads, and rounds the last
# elements of each thread's part differently.
FEW_ELEMENTS = 1 << 14


def exact_gelu(x: Tensor) -> Tensor:
    """Returns x * Φ(x) for x [T, I]. A row's bits depend on neither threads nor other rows."""
    few = max(1, FEW_ELEMENTS // x.shape[1])
    return torch.cat([gelu(x[first : first + few]) for first in range(0, len(x), few)])


def activated_linear(x: Tensor, up: PackedLinear, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(x @ up), [T, I]."""
    wide = do.linear(x, up)
    return exact_gelu(wide) if activation == "gelu" else do.activate(wide, activation)


def gated_linear(x: Tensor, gate_up: PackedLinear, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(x @ gate) * (x @ up), [T, I]. gate_up: both linears side by side, H → 2 I"""
    return gated(do.linear(x, gate_up), "gelu", do) if activation == "gelu" else do.gated_linear(x, gate_up, activation)


def gated(wide: Tensor, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(wide[:, :I]) * wide[:, I:], [T, I]. wide [T, 2 * I]: gate and up, contiguous"""
    if activation != "gelu":
        return do.act_and_mul(wide, activation)
    gate, up = wide.chunk(2, dim=1)
    return exact_gelu(gate.contiguous()) * up


# Connectors: each turns the squares of patches of an encoded image into vectors of the text model's width.


@dataclass(frozen=True, slots=True)
class ConnectorWeights:
    """The weights of a connector. A part that the connector lacks is None.

    projection: a linear to the text model's width
    norm [H]: a norm of the average, or of each patch
    before: a linear before `projection`
    joined: a linear before `before`, whose input is all patches of a square
    joined_norm [2, side * side * H]: a layer norm of all patches of a square
    """

    projection: PackedLinear
    norm: Tensor | None = None
    before: PackedLinear | None = None
    joined_norm: Tensor | None = None
    joined: PackedLinear | None = None
    standard: Tensor | None = None  # [2, H] float32: row 0 is subtracted from averages, row 1 is then their factor


def _joined(squares: Tensor) -> Tensor:
    """Concatenates the patches of each square: [tokens, side * side * H].

    squares: [squares down, side, squares across, side, H]; all functions here take this shape
    """
    down, side, across, _, hidden = squares.shape
    return squares.transpose(1, 2).reshape(down * across, side * side * hidden)


def shuffle(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Projects the concatenated patches of a square ("pixel shuffle"). For Idefics3."""
    return do.linear(_joined(squares), weights.projection)


def merge(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Passes the concatenated patches of a square through an MLP with the exact GELU. For Qwen, Mistral 3, LFM2."""
    assert weights.before is not None
    if weights.norm is not None:
        squares = do.rms_norm(squares.flatten(0, 3), weights.norm, spec.connector_eps).view_as(squares)
    x = _joined(squares)
    if weights.joined_norm is not None:
        x = do.rms_norm(x, weights.joined_norm, spec.joined_eps or spec.norm_eps)
    if weights.joined is not None:
        x = do.linear(x, weights.joined)
    return do.linear(exact_gelu(do.linear(x, weights.before)), weights.projection)


def pool(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Averages the patches of a square, norms the average, and projects it. For Gemma 3."""
    assert weights.norm is not None
    average = _averages(squares, spec)
    return do.linear(do.rms_norm(average, weights.norm, spec.norm_eps, offset=True), weights.projection)


def scaled_pool(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Averages the patches of a square, scales, standardizes and norms the average, and projects it. For Gemma 4."""
    assert weights.norm is not None
    scaled = _averages(squares, spec).float() * sqrt(spec.hidden_size)
    if weights.standard is not None:
        scaled = (scaled - weights.standard[0]) * weights.standard[1]
    return do.linear(do.rms_norm(scaled.to(squares.dtype), weights.norm, spec.norm_eps), weights.projection)


def _averages(squares: Tensor, spec: VisionSpec) -> Tensor:
    """Returns the average of the patches of each square, [tokens, H]."""
    x, total = squares.float(), None
    for down in range(spec.side):  # one addition after another, so that the order is always the same
        for across in range(spec.side):
            part = x[:, down, :, across]
            total = part if total is None else total + part
    assert total is not None
    return (total / spec.side**2).flatten(0, 1).to(squares.dtype)


CONNECTORS: Mapping[Connector, Callable[[Tensor, ConnectorWeights, VisionSpec, Operations], Tensor]] = {
    "shuffle": shuffle, "pool": pool, "merge": merge, "scaled_pool": scaled_pool,
}  # fmt: skip


# Turns pixels into the encoder's input: normalizes them and cuts them into patches.


def level_table(spec: VisionSpec) -> Tensor:
    """Returns the normalized value of each of a colour's 256 levels, [3, 256] float32, rounded as in transformers.

    Its image processors rescale in float64 and round to float32, then subtract and divide in float32. A tower that is
    `centred` then maps 0 .. 1 to -1 .. 1.
    """
    levels = (np.arange(256, dtype=np.uint8).astype(np.float64) * spec.rescale).astype(np.float32)
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    normalized = torch.from_numpy((levels[None, :] - mean[:, None]) / std[:, None])
    return 2 * (normalized - 0.5) if spec.centred else normalized


def patches_of(image: PromptImage, spec: VisionSpec, table: Tensor) -> Tensor:
    """Returns the patches [rows * columns, patch_width] of an image, in the order of rows, on the table's device.

    table: the result of level_table in the dtype of the encoder. A patch has one colour after another, each row by row
    and repeated for all frames, in the order of a convolution's weights.
    """
    patch, (rows, columns) = spec.patch_size, spec.grid_of(image.height, image.width)
    whole = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
    whole = whole[: rows * patch, : columns * patch]
    cut = whole.reshape(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)  # [rows, columns, 3, patch, patch]
    levels = cut.reshape(rows * columns, 3, patch * patch).to(table.device).long()
    colours = torch.arange(3, device=table.device)[None, :, None]
    return table[colours, levels].repeat(1, 1, spec.frames).flatten(1)


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
