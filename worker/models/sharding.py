"""Which part of a model a rank has: shards of layers (tensor parallelism) and stages (pipeline parallelism).

With tensor parallelism, each process has some heads of every layer, and some rows of every linear. No linear is cut
along its inputs. Instead, the inputs are gathered from all processes before each product. So every product adds up the
same numbers in the same order as in one process, and an answer has the same bits with any number of processes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import torch

from shared.config.worker import WorkerConfig
from worker.checkpoint.stored_weight import StackedLinear
from worker.kv_cache.tensors import CacheGroup
from worker.ops.recurrent_state import DeltaNetShape, ShortConvShape
from worker.spec import LayerSpec, ModelSpec, RecurrentShape

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
    return max(chosen, 0, *_inner(spec, layer))


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
    if not layer.bare and (not layer.sparse or (spec.experts is not None and spec.experts.beside_mlp)):
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
    return [queries, *([queries] if spec.attention_gate and not spec.separate_gate else ()), keys, keys]


def _heads(rows: int, spec: ModelSpec, layer: LayerSpec) -> list[Section]:
    return [(rows, spec.heads)]


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
    ("attention", "gates"): _heads,
    ("delta_net", "qkv"): _delta_inputs, ("delta_net", "gates"): _delta_heads, ("delta_net", "o"): _equal(1),
    ("delta_net", "conv"): _delta_channels, ("delta_net", "decay"): _delta_heads,
    ("delta_net", "dt_bias"): _delta_heads,
    ("short_conv", "qkv"): _equal(3), ("short_conv", "o"): _equal(1), ("short_conv", "conv"): _equal(1),
    ("latent", "q"): _heads, ("latent", "kv_b"): _heads,
    ("latent", "k_b"): _heads, ("latent", "v_b"): _heads, ("latent", "o"): _equal(1),
    ("", "gate_up"): _gate_up, ("", "down"): _equal(1),
    ("", "expert_gate_up"): _gate_up, ("", "expert_down"): _equal(1),
}  # fmt: skip
# linears that every process has in full: they are small, or all heads need their outputs (latent attention)
WHOLE = ("router", "shared_gate", "q_a", "kv_a")
SHARED_MIXERS = {kind for kind, _ in SECTIONS}


def _by_module(kept: torch.Tensor, linear: StackedLinear) -> Iterator[torch.Tensor]:
    """Splits ascending row indices of a stacked linear into the indices within each of its modules."""
    begin = 0
    for rows in linear.rows:
        yield kept[(kept >= begin) & (kept < begin + rows)] - begin
        begin += rows


# Cuts the layers of a model into stages, one for each process or group of processes (pipeline parallelism).
#
# A stage has consecutive layers, with their K/V and states. The first stage also has the embedding and the LM head.
# Stages hand over the residual stream unchanged, so answers have the same bits with any number of stages.


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers bounds[index] .. bounds[index + 1] - 1. bounds: each stage's first layer, and then the number of all
    layers
    """

    index: int
    bounds: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.bounds[self.index]

    @property
    def end(self) -> int:
        return self.bounds[self.index + 1]

    @property
    def count(self) -> int:
        """The number of all stages."""
        return len(self.bounds) - 1

    def __len__(self) -> int:
        """Returns the number of layers of this stage."""
        return self.end - self.first

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of this stage, whose layers are counted from 0."""
        layers = (
            layer if layer.shares is None else replace(layer, shares=layer.shares - self.first)
            for layer in spec.layers[self.first : self.end]
        )
        return replace(spec, layers=tuple(layers))

    def groups(self, groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
        """Returns the cache groups with only the layers of this stage. A group without such layers is empty."""
        return tuple(
            replace(group, layers=tuple(i - self.first for i in group.layers if self.first <= i < self.end))
            for group in groups
        )


def bounds_of_stages(
    spec: ModelSpec, layers: Sequence[int], beside: int, count: int, for_images: int = 0
) -> tuple[int, ...]:
    """Cuts a model into stages so that the largest one has as few bytes as possible.

    layers: the bytes of each layer
    beside: the bytes of the embedding and everything else that the first stage has in addition to its layers
    for_images: how many of the first layers get vectors of images; the first stage has all of these layers

    Returns the first layer of each stage, and then the number of layers. Raises CannotShare if the model cannot be cut.
    """
    flag, total = f"--pipeline-parallel-size {count}", len(layers)
    if count > total:
        raise CannotShare(f"{flag} is more than the model's {total} layers")
    cuts = [cut for cut in range(1, total) if _can_cut(spec, cut) and cut >= for_images]
    if count - 1 > len(cuts):
        raise CannotShare(
            f"{flag}: this model can be cut into {len(cuts) + 1} stages at most, because some of its {total} layers "
            "belong together"
        )
    return _balanced(layers, beside, count, cuts)


def _can_cut(spec: ModelSpec, cut: int) -> bool:
    """Returns whether a stage may begin with layer `cut`.

    Layers that read the same K/V stay together. If the model has recurrent layers, the first stage must have at least
    one, because the runner looks only at the first stage to see whether steps need slots for states.
    """
    if any(layer.shares is not None and layer.shares < cut for layer in spec.layers[cut:]):
        return False
    return not spec.recurrent or any(layer.recurrent for layer in spec.layers[:cut])


def _balanced(layers: Sequence[int], beside: int, count: int, cuts: Sequence[int]) -> tuple[int, ...]:
    end = len(layers)

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Cuts the layers from `first` on into stages. Returns the largest stage's bytes, and the end of each stage."""
        own = 0 if first else beside
        if stages == 1:
            return own + sum(layers[first:]), (end,)
        tried = ((own + sum(layers[first:cut]), cut, best(cut, stages - 1)) for cut in cuts if cut > first)
        return min(((max(size, most), (cut, *ends)) for size, cut, (most, ends) in tried), default=(inf, ()))

    return 0, *best(0, count)[1]


# Which part of a model each process has: a stage, and a share of each of its layers.


@dataclass(frozen=True, slots=True)
class Part:
    """The part of process `rank`. Rank `tp_size * s + n` has share n of stage s.

    tp_size: the number of processes that share each layer
    bounds: as in Stage
    """

    rank: int
    tp_size: int
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of all processes."""
        return self.tp_size * self.stage.count

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def before(self) -> int:
        """The rank with the same share of the stage before this one. The last stage comes before the first one."""
        return (self.rank - self.tp_size) % self.count

    @property
    def after(self) -> int:
        """The rank with the same share of the stage after this one. The first stage comes after the last one."""
        return (self.rank + self.tp_size) % self.count

    @property
    def stage(self) -> Stage:
        return Stage(self.rank // self.tp_size, self.bounds)

    @property
    def share(self) -> Share | None:
        """The share that this process has of each layer; None if it has whole layers."""
        return Share(self.tp_rank, self.tp_size) if self.tp_size > 1 else None

    @property
    def next(self) -> "Part":
        """The part of the process with the next rank. Rank 0 comes after the last rank."""
        return Part((self.rank + 1) % self.count, self.tp_size, self.bounds)

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of this part, which has fewer heads and layers than the model."""
        of_stage = self.stage.spec(spec)
        return of_stage if self.share is None else self.share.spec(of_stage)

    def whole_kv(self, nbytes: int, spec: ModelSpec) -> int:
        """Returns how many bytes the K/V and states of the whole model may take if this process has room for `nbytes`.

        The sizes of the pools are not known yet. So the limit comes from that kind of K/V or state of which this
        process holds the largest fraction.
        """
        whole, own = _kept(spec.layers, spec), _kept(self.stage.spec(spec).layers, spec)
        parts = min((whole[kind] / size for kind, size in own.items()), default=1.0)
        return int(nbytes * parts) * parts_of_kv(spec, self.tp_size)


def parts_of(
    spec: ModelSpec, worker: WorkerConfig, sizes: Callable[[], tuple[list[int], int]], for_images: int = 0
) -> tuple[Part, ...]:
    """Returns the parts of all processes. Raises CannotShare if the model cannot be split in this way.

    sizes: returns the bytes of each layer, and the bytes of the rest of the model, which belongs to the first stage
    for_images: as for bounds_of_stages
    """
    tp_size, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    if tp_size > 1:
        check(spec, tp_size)
    bounds = (0, len(spec.layers)) if stages == 1 else bounds_of_stages(spec, *sizes(), stages, for_images)
    return tuple(Part(rank, tp_size, bounds) for rank in range(worker.ranks))


def _kept(layers: Iterable[LayerSpec], spec: ModelSpec) -> dict[object, int]:
    """Returns how much K/V or state the layers store, by kind: the window of K/V, or the shape of a state.

    Only amounts of the same kind have the same unit and can be compared.
    """
    found: dict[object, int] = {}
    for kind, size in _each_kept(layers, spec):
        found[kind] = found.get(kind, 0) + size
    return found


def _each_kept(layers: Iterable[LayerSpec], spec: ModelSpec) -> Iterator[tuple[object, int]]:
    for layer in layers:
        if layer.state is not None:
            yield layer.state, 1
        elif layer.shares is None:
            heads, size = spec.kv_shape(layer)
            yield layer.window, heads * size
