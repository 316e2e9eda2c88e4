"""Splits every layer of a model between several processes (tensor parallelism).

Each process has some heads of every layer, and some rows of every linear. No linear is cut along its inputs. Instead,
the inputs are gathered from all processes before each product. So every product adds up the same numbers in the same
order as in one process, and an answer has the same bits with any number of processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from worker.kernels.recurrent.delta_net import DeltaNetShape
from worker.kernels.recurrent.recurrent_state import RecurrentShape
from worker.kernels.recurrent.short_conv import ShortConvShape
from worker.model.checkpoint.stacked_linear import StackedLinear
from worker.spec import LayerSpec, ModelSpec

MOST = 8  # the most processes that an error message recommends
Section = tuple[int, int]  # (rows of a weight, the number of units, such as heads, that these rows form)
Sections = Callable[[int, ModelSpec, LayerSpec], list[Section]]  # the int is the weight's number of rows


class CannotShare(Exception):
    """The model cannot be split between so many processes. The message says why and, if possible, what would work."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of process `rank` among `count` processes."""

    rank: int
    count: int

    @property
    def next(self) -> "Share":
        """The share of the process with the next rank. Rank 0 comes after the last rank."""
        return Share((self.rank + 1) % self.count, self.count)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of this share, which has fewer heads than the model."""
        layers = tuple(
            replace(layer, kv_heads=self._units(layer.kv_heads), state=self._state(layer.state))
            for layer in spec.layers
        )
        return replace(spec, heads=spec.heads // self.count, kv_heads=self._units(spec.kv_heads), layers=layers)

    def cut(self, field: str, linear: StackedLinear, spec: ModelSpec, layer: LayerSpec) -> StackedLinear:
        """Returns the linear with only the rows of this share. field: its name in the weights of the mixer or MLP"""
        if field in WHOLE:
            return linear
        kept = self._kept(_sections(field, sum(linear.rows), spec, layer))
        return replace(linear, kept=tuple(_by_module(kept, linear)), apart=linear.apart // self.count)

    def small(self, field: str, weight: torch.Tensor, spec: ModelSpec, layer: LayerSpec) -> torch.Tensor:
        """Returns the rows of a small weight that this share needs. field: its name in the weights of the mixer"""
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
        """Returns which rows of the LM head belong to this share. rows: the number of rows of the whole head"""
        size = rows // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def _units(self, units: int) -> int:
        """Returns how many units this share has. If there are fewer units than processes, processes share a unit."""
        return units if not units else max(1, units // self.count)


def check(spec: ModelSpec, count: int) -> None:
    """Raises CannotShare if the model cannot be split between `count` processes."""
    if missing := next(_unknown(spec), ""):
        raise CannotShare(f"--tensor-parallel-size {count}: {missing} cannot be shared yet; use 1")
    works = [size for size in range(1, MOST + 1) if not _problem(spec, size)]
    if problem := _problem(spec, count):
        raise CannotShare(
            f"--tensor-parallel-size {count} does not divide {problem}; {', '.join(map(str, works))} would work"
        )


def largest_inner(spec: ModelSpec, layer: LayerSpec) -> int:
    """Returns how many inputs the widest down projection of a layer has. For experts, returns the sum over a row's
    experts.
    """
    chosen = spec.experts.chosen * spec.experts.intermediate_size if layer.sparse and spec.experts is not None else 0
    return max(chosen, *_inner(spec, layer))


def parts_of_kv(spec: ModelSpec, count: int) -> int:
    """Returns how many processes together hold all K/V once: fewer than `count` if there are fewer K/V heads."""
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
    """Yields names of the parts of the model that this module cannot split."""
    for layer in spec.layers:
        if layer.mixer not in SHARED_MIXERS:
            yield f"a mixer of the kind {layer.mixer}"
    if spec.whole_qk_norm:
        yield "a norm over all heads"


def _sections(field: str, rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    """Returns the sections of a weight's rows. A process gets its share of each section."""
    by_kind = SECTIONS.get((layer.mixer, field))
    return by_kind(rows, spec, layer) if by_kind is not None else SECTIONS["", field](rows, spec, layer)


def _attention(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    kv_heads, head_dim = spec.kv_shape(layer)
    queries, keys = (spec.heads * head_dim, spec.heads), (kv_heads * head_dim, kv_heads)
    if layer.shares is not None:
        return [queries]
    return [queries, *([queries] if spec.attention_gate else ()), keys, keys]


def _delta(layer: LayerSpec) -> tuple[DeltaNetShape, Section, Section]:
    """Returns the shape, and the sections of keys and of values. A value head stays with the key head that it uses."""
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


SECTIONS: Mapping[tuple[str, str], Sections] = {  # keys: (kind of the mixer, or "" for an MLP; name of the weight)
    ("attention", "qkv"): _attention, ("attention", "o"): _equal(1), ("attention", "sinks"): _equal(1),
    ("delta_net", "qkv"): _delta_inputs, ("delta_net", "gates"): _delta_heads, ("delta_net", "o"): _equal(1),
    ("delta_net", "conv"): _delta_channels, ("delta_net", "decay"): _delta_heads,
    ("delta_net", "dt_bias"): _delta_heads,
    ("short_conv", "qkv"): _equal(3), ("short_conv", "o"): _equal(1), ("short_conv", "conv"): _equal(1),
    ("", "gate_up"): _gate_up, ("", "down"): _equal(1),
    ("", "expert_gate_up"): _gate_up, ("", "expert_down"): _equal(1),
}  # fmt: skip
WHOLE = ("router", "shared_gate")  # small linears that are not split: every process has all rows
SHARED_MIXERS = {kind for kind, _ in SECTIONS}


def _by_module(kept: torch.Tensor, linear: StackedLinear) -> Iterator[torch.Tensor]:
    """Splits ascending row indices of a stacked linear into the indices within each of its modules."""
    begin = 0
    for rows in linear.rows:
        yield kept[(kept >= begin) & (kept < begin + rows)] - begin
        begin += rows
