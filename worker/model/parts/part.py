"""Which part of a model each process has: a stage, and a share of each of its layers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shared.config import WorkerConfig
from worker.model.parts.share import Share, check, parts_of_kv
from worker.model.parts.stages import Stage, bounds_of_stages
from worker.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """The part of process `rank`. Rank `lanes * s + n` has share n of stage s.

    lanes: the number of processes that share each layer
    bounds: as in Stage
    """

    rank: int
    lanes: int
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of all processes."""
        return self.lanes * self.stage.count

    @property
    def lane(self) -> int:
        return self.rank % self.lanes

    @property
    def before(self) -> int:
        """The rank with the same share of the stage before this one. The last stage comes before the first one."""
        return (self.rank - self.lanes) % self.count

    @property
    def after(self) -> int:
        """The rank with the same share of the stage after this one. The first stage comes after the last one."""
        return (self.rank + self.lanes) % self.count

    @property
    def stage(self) -> Stage:
        return Stage(self.rank // self.lanes, self.bounds)

    @property
    def share(self) -> Share | None:
        """The share that this process has of each layer; None if it has whole layers."""
        return Share(self.lane, self.lanes) if self.lanes > 1 else None

    @property
    def next(self) -> "Part":
        """The part of the process with the next rank. Rank 0 comes after the last rank."""
        return Part((self.rank + 1) % self.count, self.lanes, self.bounds)

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
        return int(nbytes * parts) * parts_of_kv(spec, self.lanes)


def parts_of(
    spec: ModelSpec, worker: WorkerConfig, sizes: Callable[[], tuple[list[int], int]], for_pictures: int = 0
) -> tuple[Part, ...]:
    """Returns the parts of all processes. Raises CannotShare if the model cannot be split in this way.

    sizes: returns the bytes of each layer, and the bytes of the rest of the model, which belongs to the first stage
    for_pictures: as for bounds_of_stages
    """
    lanes, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    if lanes > 1:
        check(spec, lanes)
    bounds = (0, len(spec.layers)) if stages == 1 else bounds_of_stages(spec, *sizes(), stages, for_pictures)
    return tuple(Part(rank, lanes, bounds) for rank in range(worker.ranks))


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
