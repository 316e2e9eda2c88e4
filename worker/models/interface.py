"""What a model is to the code that runs its steps: the decoder, in PyTorch or in C, and one that is cut into stages."""

from ctypes import c_uint64
from typing import Protocol

from torch import Tensor

from worker.kv_cache.tensors import KVCache
from worker.models.forward_inputs import ForwardInputs
from worker.operations import Operations
from worker.spec import ModelSpec


class Forward(Protocol):
    """Computes steps, or what is left of one step; the methods of worker/models/decoder.py that compute."""

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor: ...
    def logits(self, h: Tensor) -> Tensor: ...


class Model(Forward, Protocol):
    """The interface of worker/models/decoder.py and worker/models/cpu_decoder.py."""

    spec: ModelSpec
    operations: Operations
    max_positions: int
    layers_started: c_uint64

    def count_replayed(self) -> None: ...
    def with_operations(self, operations: Operations) -> "Model": ...


class Pipeline(Protocol):
    """A model whose layers are cut into stages (worker/distributed/pipeline.py)."""

    operations: Operations

    @property
    def stages(self) -> int:
        """How many steps may be in flight: as many as there are stages."""

    def begin(self, inputs: ForwardInputs) -> Forward:
        """Begins a step, even if earlier steps have not ended yet.

        Returns what computes the rest of this step: its `hidden` waits for the rows of the last stage.
        """

    def with_operations(self, operations: Operations) -> "Pipeline": ...
