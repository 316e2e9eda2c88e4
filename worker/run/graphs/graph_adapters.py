"""The captured forwards of steps with LoRA adapters, one for each shape.

They are captured after the first step of their shape, and again whenever an adapter changes more than those before it
(worker/run/graphs/adapters_in_graphs.py). Steps without adapters have other graphs, and pay nothing for these.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from worker.model.inputs.forward_inputs import ForwardInputs
from worker.run.graphs.graph_capture import GraphAdapters, StaticForward, StaticMemory
from worker.run.graphs.graph_shapes import Shape
from worker.schedule.records.adapter_use import AdapterUse
from worker.schedule.sequence import Chunk, Plan


@dataclass(slots=True, eq=False)
class AdaptedForwards:
    """make: called before the first step with adapters. on: whether graphs may be used for such steps. tested: whether
    the self-test has run.
    """

    make: Callable[[], GraphAdapters]
    memory: StaticMemory
    on: bool = True
    tested: bool = False
    of_shapes: dict[Shape, StaticForward] = field(default_factory=dict)
    _adapters: GraphAdapters | None = None
    _generation: int = 0

    def place(self, chunks: Seq[Chunk]) -> list[int] | None:
        """Returns the slot of each chunk's adapter; None if the step must run without a graph."""
        slots = self._made().place(chunks)
        if self._made().generation != self._generation:
            self.of_shapes, self._generation = {}, self._made().generation
        return slots

    def step(self, shape: Shape) -> StaticForward:
        """Returns the forward of a shape. Call place() first, which may make earlier ones expire."""
        if shape not in self.of_shapes:
            adapters = self._made().step(shape)
            self.of_shapes[shape] = StaticForward(shape, self.memory, adapters.forward, adapters)
        return self.of_shapes[shape]

    def eager(self, chunks: Seq[Chunk], inputs: ForwardInputs) -> Tensor:
        """Returns the logits of a step without a graph, [R, vocab] float32."""
        return self._made().eager(chunks, inputs)

    def _made(self) -> GraphAdapters:
        if self._adapters is None:
            self._adapters = self.make()
        return self._adapters


def with_adapters(plan: Plan, uses: Seq[AdapterUse]) -> Plan:
    """Gives every other sequence of a dummy step one of these adapters. Returns the plan."""
    for number, chunk in enumerate(plan.chunks):
        chunk.sequence.adapter = None if number % 2 else uses[number // 2 % len(uses)]
    return plan
