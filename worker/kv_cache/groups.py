"""Divides the layers of a model into groups. Layers with the same sliding window, or without one, form a group.

The layers of a group share a page table: a page of the group holds K and V of `page_size` tokens in all its layers.
Layers with a recurrent state, and layers that share the K/V of another layer, have no K/V of their own and are in no
group. Each group has its own tensors (tensors.py) and its own pool of pages (pages.py).
"""

from dataclasses import dataclass

from worker.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of layers. window: the sliding window of its layers; 0: none. layers: the indices of its layers."""

    window: int
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """Which positions of a sequence the group keeps: `window` (the last ones) or `full` (all)."""
        return "window" if self.window else "full"

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} layers with a window of {self.window}" if self.window else f"{len(self.layers)} layers"
        )


def _keeps(layer: LayerSpec) -> bool:
    return not layer.recurrent and layer.shares is None


def one_group(spec: ModelSpec) -> tuple[CacheGroup]:
    """Returns a single group without a window that contains all layers with K/V."""
    return (CacheGroup(0, tuple(index for index, layer in enumerate(spec.layers) if _keeps(layer))),)


def cache_groups(spec: ModelSpec, max_seq_len: int, *, paged: bool) -> tuple[CacheGroup, ...]:
    """Returns the groups, the group without a window first.

    A window gets no group of its own if no sequence is longer than it. If `paged` is False, a sequence is one page,
    and all layers form one group.
    """
    if not paged:
        return one_group(spec)
    windows = {
        index: layer.window if layer.window < max_seq_len else 0
        for index, layer in enumerate(spec.layers)
        if _keeps(layer)
    }
    return tuple(
        CacheGroup(window, tuple(index for index, other in windows.items() if other == window))
        for window in sorted(set(windows.values()))
    )
