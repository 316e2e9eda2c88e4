"""What one of several processes has of a model that they compute together (tensor parallelism).

Each has some heads of every layer, and some rows of every linear. No linear is cut along its inputs: they are gathered
from all processes before each product. So every product adds up the same numbers in the same order as in one process,
and an answer has the same bits with any number of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from worker.kernels.recurrent.delta_net import DeltaNetShape
from worker.kernels.recurrent.recurrent_state import RecurrentShape
from worker.kernels.recurrent.short_conv import ShortConvShape
from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.spec import LayerSpec, ModelSpec

MOST = 8  # processes
Section = tuple[int, int]  # rows of a weight in memory, and the number of units that they are dealt out in
Sections = Callable[[int, ModelSpec, LayerSpec], list[Section]]  # of a weight with so many rows


class CannotShare(Exception):
    """The model cannot be shared by so many processes. The message names what it has, and what would work."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of process `rank` of `count`."""

    rank: int
    count: int

    @property
    def next(self) -> "Share":
        """The share of the next process; behind the last one is the first."""
        return Share((self.rank + 1) % self.count, self.count)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of the part: it has fewer heads."""
        layers = tuple(
            replace(layer, kv_heads=self._units(layer.kv_heads), state=self._state(layer.state))
            for layer in spec.layers
        )
        return replace(spec, heads=spec.heads // self.count, kv_heads=self._units(spec.kv_heads), layers=layers)

    def cut(self, field: str, linear: StackedLinear, spec: ModelSpec, layer: LayerSpec) -> StackedLinear:
        """Returns a linear with the rows of this part. field: its name in the weights of the layer's part."""
        if field in WHOLE:
            return linear
        kept = self._kept(_sections(field, sum(linear.rows), spec, layer))
        return replace(linear, kept=tuple(_by_module(kept, linear)), apart=linear.apart // self.count)

    def small(self, field: str, weight: torch.Tensor, spec: ModelSpec, layer: LayerSpec) -> torch.Tensor:
        """Returns what this part needs of a small weight. field: its name in the weights of the layer's part."""
        if (layer.mixer, field) not in SECTIONS:
            return weight
        return weight[self._kept(_sections(field, len(weight), spec, layer)).to(weight.device)]

    def _kept(self, sections: Iterable[Section]) -> torch.Tensor:
        begin, kept = 0, []
        for rows, units in sections:
            size, own = rows // units, self._units(units)
            first = self.rank * units // self.count
            kept.append(torch.arange(begin + first * size, begin + (first + own) * size))
            begin += rows
        return torch.cat(kept)

    def _state(self, state: RecurrentShape | None) -> RecurrentShape | None:
        match state:
            case DeltaNetShape():
                heads, values = state.key_heads // self.count, state.value_heads // self.count
                return replace(state, key_heads=heads, value_heads=values)
            case ShortConvShape():
                return replace(state, channels=state.channels // self.count)
        return state

    def head(self, rows: int) -> slice:
        """Returns the rows of the head, of which there are `rows` in all."""
        size = rows // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def _units(self, units: int) -> int:
        """Returns how many of the units this part has. If there are fewer units than parts, several have the same."""
        return units if not units else max(1, units // self.count)


def check(spec: ModelSpec, count: int) -> None:
    """Raises CannotShare if the model has something that `count` processes cannot share."""
    if missing := next(_unknown(spec), ""):
        raise CannotShare(f"--tensor-parallel-size {count}: {missing} cannot be shared yet; use 1")
    works = [size for size in range(1, MOST + 1) if not _problem(spec, size)]
    if problem := _problem(spec, count):
        raise CannotShare(
            f"--tensor-parallel-size {count} does not divide {problem}; {', '.join(map(str, works))} would work"
        )


def largest_inner(spec: ModelSpec, layer: LayerSpec) -> int:
    """Returns the most inputs that the last linear of a layer's feed-forward has for a row."""
    chosen = spec.experts.chosen * spec.experts.intermediate_size if layer.sparse and spec.experts is not None else 0
    return max(chosen, *_inner(spec, layer))


def parts_of_kv(spec: ModelSpec, count: int) -> int:
    """Returns how many processes it takes to hold all K/V once: fewer than `count` if there are fewer heads."""
    return min(count, *(spec.kv_shape(layer)[0] for layer in spec.layers))


def _problem(spec: ModelSpec, count: int) -> str:
    if spec.heads % count:
        return f"the {spec.heads} query heads"
    for layer in spec.layers:
        kv_heads, state = spec.kv_shape(layer)[0], layer.state
        if isinstance(state, DeltaNetShape) and state.key_heads % count:
            return f"the {state.key_heads} key heads of recurrent layers"
        if kv_heads % count and count % kv_heads:
            return f"the {kv_heads} key/value heads"
        if wrong := next((inner for inner in _inner(spec, layer) if inner % count), 0):
            return f"the {wrong} inner dimensions of an MLP"
    sizes = {"hidden dimensions": spec.hidden_size, "rows of the head": spec.labels or spec.vocab_size}
    return next((f"the {size} {name}" for name, size in sizes.items() if size % count), "")


def _inner(spec: ModelSpec, layer: LayerSpec) -> Iterator[int]:
    """Yields the inner sizes of the MLPs of a layer."""
    if layer.sparse and spec.experts is not None:
        yield spec.experts.intermediate_size
        yield spec.experts.shared_size
    if not layer.sparse or (spec.experts is not None and spec.experts.beside_mlp):
        yield layer.intermediate_size or spec.intermediate_size


def _unknown(spec: ModelSpec) -> Iterator[str]:
    """Yields what the model has that this module knows no cut of."""
    for layer in spec.layers:
        if layer.mixer not in SHARED_MIXERS:
            yield f"a mixer of the kind {layer.mixer}"
    if spec.whole_qk_norm:
        yield "a norm over all heads"


def _sections(field: str, rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    """Returns how the rows of a weight are dealt out. A process gets its share of each section."""
    by_kind = SECTIONS.get((layer.mixer, field))
    return by_kind(rows, spec, layer) if by_kind is not None else SECTIONS["", field](rows, spec, layer)


def _attention(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    kv_heads, head_dim = spec.kv_shape(layer)
    queries, keys = (spec.heads * head_dim, spec.heads), (kv_heads * head_dim, kv_heads)
    if layer.shares is not None:
        return [queries]
    return [queries, *([queries] if spec.attention_gate else ()), keys, keys]


def _delta(layer: LayerSpec) -> tuple[DeltaNetShape, Section, Section]:
    """Returns the shape, and the sections of all keys and of all values. A key head has its value heads with it."""
    shape = layer.state
    assert isinstance(shape, DeltaNetShape)
    return shape, (shape.key_heads * shape.key_dim, shape.key_heads), (shape.values, shape.key_heads)


def _delta_inputs(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    _, keys, values = _delta(layer)
    return [keys, keys, values, values]


def _delta_channels(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    return _delta_inputs(rows, spec, layer)[:3]


def _delta_heads(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    shape, _, _ = _delta(layer)
    return [(shape.value_heads, shape.key_heads)] * (rows // shape.value_heads)


def _equal(parts: int) -> Sections:
    return lambda rows, spec, layer: [(rows // parts, rows // parts)] * parts


def _gate_up(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    return _equal(1 + spec.gated)(rows, spec, layer)


SECTIONS: Mapping[tuple[str, str], Sections] = {  # by the kind of a mixer, or "" for a feed-forward, and the field
    ("attention", "qkv"): _attention, ("attention", "o"): _equal(1), ("attention", "sinks"): _equal(1),
    ("delta_net", "qkv"): _delta_inputs, ("delta_net", "gates"): _delta_heads, ("delta_net", "o"): _equal(1),
    ("delta_net", "conv"): _delta_channels, ("delta_net", "decay"): _delta_heads,
    ("delta_net", "dt_bias"): _delta_heads,
    ("short_conv", "qkv"): _equal(3), ("short_conv", "o"): _equal(1), ("short_conv", "conv"): _equal(1),
    ("", "gate_up"): _gate_up, ("", "down"): _equal(1),
    ("", "expert_gate_up"): _gate_up, ("", "expert_down"): _equal(1),
}  # fmt: skip
WHOLE = ("router", "shared_gate")  # small linears that every process has
SHARED_MIXERS = {kind for kind, _ in SECTIONS}


def _by_module(kept: torch.Tensor, linear: StackedLinear) -> Iterator[torch.Tensor]:
    """Splits ascending indices of rows in memory into those of each module, counted from its first row."""
    begin = 0
    for rows in linear.rows:
        yield kept[(kept >= begin) & (kept < begin + rows)] - begin
        begin += rows
