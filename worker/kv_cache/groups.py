"""Divides the layers of a model into groups by what they keep of a sequence.

The layers of a group share a page table: a page of the group holds K and V of `page_size` tokens in all its layers.
Layers with a recurrent state keep no K/V, nor do layers that share those of another one; they are in no group.
Each group has its own tensors (tensors.py) and its own pool of pages (pages.py).
"""

from dataclasses import dataclass

from worker.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """window: a sequence keeps the pages that rows with this window read; if 0, all. layers: their numbers."""

    window: int
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the group keeps of a sequence: `window` or `full`."""
        return "window" if self.window else "full"

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} layers with a window of {self.window}" if self.window else f"{len(self.layers)} layers"
        )


def _keeps(layer: LayerSpec) -> bool:
    return not layer.recurrent and layer.shares is None


def one_group(spec: ModelSpec) -> tuple[CacheGroup]:
    """Returns a group of all layers with K/V that keeps everything."""
    return (CacheGroup(0, tuple(index for index, layer in enumerate(spec.layers) if _keeps(layer))),)


def cache_groups(spec: ModelSpec, max_seq_len: int, *, paged: bool) -> tuple[CacheGroup, ...]:
    """Returns the groups, without a window first.

    A window is not worth a group if no sequence is longer, or if a sequence is one page (`paged` is False).
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
