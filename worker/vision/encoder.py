"""The forward of a tower and the connector behind it: one picture becomes vectors of the text model's width.

A picture is encoded alone, and by operations that give a row the same bits with any number of threads. So its vectors
depend on nothing but its pixels.
"""

from ctypes import c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.messages import Picture
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.vision.attention import attend_all
from worker.vision.connectors import CONNECTORS, ConnectorWeights
from worker.vision.positions import rotary_tables, stretched
from worker.vision.preprocess import level_table, patches_of
from worker.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    """The weights of a layer. H: hidden size. Norms are layer norms [2, H]: a weight and a bias."""

    before_attention: Tensor
    qkv: PackedLinear
    o: PackedLinear
    before_mlp: Tensor
    up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderWeights:
    """patches: the convolution over patches as a linear; positions [P, H]: one for each patch, or a grid to stretch"""

    patches: PackedLinear
    positions: Tensor
    layers: list[EncoderLayer]
    norm: Tensor
    connector: ConnectorWeights
    deepstack: list[ConnectorWeights]  # behind the layers of VisionSpec.deepstack


class Encoder:
    """A tower that is ready to run."""

    def __init__(self, spec: VisionSpec, weights: EncoderWeights, operations: Operations, started: c_uint64) -> None:
        """started: counts the layers of all pictures, which shows that a long step makes progress."""
        self.spec, self.weights, self._do, self._started = spec, weights, operations, started
        positions = weights.positions
        self._table = level_table(spec).to(positions.device).to(positions.dtype)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """Returns the vectors of a picture, [tokens, text_size], and beside them those of deepstack, as wide each."""
        spec, weights, do = self.spec, self.weights, self._do
        rows, columns = spec.grid_of(picture.height, picture.width)
        positions, tables = weights.positions, None
        if spec.position_side:
            positions = stretched(positions, spec.position_side, rows, columns).to(positions.dtype)
        if spec.rotary_theta:
            head = spec.hidden_size // spec.heads
            tables = rotary_tables(rows, columns, head, spec.rotary_theta, positions.device)
        x = do.linear(patches_of(picture, spec, self._table), weights.patches) + positions  # [N, H]
        h = do.rms_norm(x, weights.layers[0].before_attention, spec.norm_eps)
        norms = [*(layer.before_attention for layer in weights.layers[1:]), weights.norm]
        stack = dict(zip(spec.deepstack, weights.deepstack, strict=True))
        more = []
        for index, (layer, norm) in enumerate(zip(weights.layers, norms, strict=True)):
            self._started.value += 1
            h = attend_all(do.linear(h, layer.qkv), spec.heads, do, tables)
            h, x = do.linear_add_norm(h, layer.o, x, layer.before_mlp, spec.norm_eps)
            h = do.activate(do.linear(h, layer.up), spec.activation)
            h, x = do.linear_add_norm(h, layer.down, x, norm, spec.norm_eps)
            if index in stack:
                more.append(self._connected(x, stack[index], picture))
        first = self._connected(h, weights.connector, picture)
        return torch.cat([first, *more], dim=1) if more else first

    def _connected(self, x: Tensor, connector: ConnectorWeights, picture: Picture) -> Tensor:
        spec = self.spec
        down, across = spec.squares_of(picture.height, picture.width)
        squares = x.view(down, spec.side, across, spec.side, spec.hidden_size)
        return CONNECTORS[spec.connector](squares, connector, spec, self._do)
