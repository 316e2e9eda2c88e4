"""Cuts the layers of a model into stages, one for each process or group of processes (pipeline parallelism).

A stage has consecutive layers, with their K/V and states. The first stage also has the embedding and the LM head.
Stages hand over the residual stream unchanged, so answers have the same bits with any number of stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from worker.kv_cache.groups import CacheGroup
from worker.model.parts.share import CannotShare
from worker.spec import ModelSpec


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
    spec: ModelSpec, layers: Sequence[int], beside: int, count: int, for_pictures: int = 0
) -> tuple[int, ...]:
    """Cuts a model into stages so that the largest one has as few bytes as possible.

    layers: the bytes of each layer
    beside: the bytes of the embedding and everything else that the first stage has in addition to its layers
    for_pictures: how many of the first layers get vectors of pictures; the first stage has all of these layers

    Returns the first layer of each stage, and then the number of layers. Raises CannotShare if the model cannot be cut.
    """
    flag, total = f"--pipeline-parallel-size {count}", len(layers)
    if count > total:
        raise CannotShare(f"{flag} is more than the model's {total} layers")
    cuts = [cut for cut in range(1, total) if _can_cut(spec, cut) and cut >= for_pictures]
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
