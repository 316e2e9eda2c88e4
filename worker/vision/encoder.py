"""The forward pass of a tower and its connector: turns one picture into vectors of the text model's width.

Each picture is encoded alone, by operations that give a row the same bits with any number of threads. So its vectors
depend only on its pixels.

A picture is encoded in pieces, so that a worker can compute steps between them. A piece is some rows of a layer. The
bits of a row do not depend on how rows are divided into pieces.
"""

from collections.abc import Generator, Sequence
from ctypes import c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.messages import Picture
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.vision.activations import activated_linear, gated_linear
from worker.vision.attention import ATTENTION_COST, ROWS, Queries
from worker.vision.connectors import CONNECTORS, ConnectorWeights
from worker.vision.positions import by_axes, resized, rotary_tables, stretched
from worker.vision.preprocess import level_table, patches_of
from worker.vision.sandwich import SandwichLayer
from worker.vision.spec import VisionSpec
from worker.vision.windows import Windows, in_windows

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
    def encode(self, picture: Picture) -> Tensor:
        """Returns the vectors of a picture [tokens, text_size]. Vectors for deepstack are further columns."""
        pieces = self.pieces(picture)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                found: Tensor = done.value
                return found

    def pieces(self, picture: Picture) -> Generator[int, None, Tensor]:
        """Encodes a picture, and yields after each piece its cost in multiplications. Returns the same as `encode`."""
        spec, weights, do = self.spec, self.weights, self._do
        rows, columns = spec.grid_of(picture.height, picture.width)
        everything, order = Windows((rows * columns,)), None
        windows = everything
        x = do.linear(patches_of(picture, spec, self._table), weights.patches)  # [N, H]
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
                more.append(self._connected(x, order, stack[index], picture))
        first = self._connected(h, order, weights.connector, picture)
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

    def _connected(self, x: Tensor, order: Tensor | None, connector: ConnectorWeights, picture: Picture) -> Tensor:
        """Applies a connector. order: for each row of x, its position in the picture; None: rows are in order"""
        spec = self.spec
        if order is not None:
            x = torch.empty_like(x).index_copy_(0, order, x)
        down, across = spec.squares_of(picture.height, picture.width)
        squares = x.view(down, spec.side, across, spec.side, spec.hidden_size)
        return CONNECTORS[spec.connector](squares, connector, spec, self._do)
