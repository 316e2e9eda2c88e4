"""The only input of the model: the tokens of all sequences of a step, concatenated, without padding or masks.

worker/model_runner/inputs.py builds it from a plan; decoder.py and the attention kernels read it. To add a column,
declare it here, and add the function that computes it to worker/model_runner/inputs.py.
"""

from ctypes import c_uint64
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor, int32, int64

from worker.kv_cache.pages import SCRATCH
from worker.kv_cache.tensors import KVCache
from worker.operations import Operations
from worker.ops.recurrent_state import NO_STATE, StateSlots
from worker.spec import ModelSpec

# Defines a column of a step: an array with an element for each token, sequence or row of logits.
#
# This module declares each column once. Three things follow from the declarations: the tensors of a step
# (worker/model_runner/inputs.py), the memory of captured steps with their padding
# (worker/model_runner/cuda_graph_inputs.py), and the structure that the C library reads (cpu_decoder.py).


class Extent(StrEnum):
    """The length of a column. T: tokens of the step; S: sequences; R: rows with logits"""

    TOKENS = "T"
    SEQUENCES = "S"
    BOUNDS = "S + 1"
    LOGITS = "R"


class Padding(Enum):
    """How a column is padded where the padding is not one fixed number."""

    SCRATCH_SLOT = "the last slot of the scratch page"
    COMPUTED = "what makes sequences of the padding: a function of cuda_graph_inputs.py for this column alone"


@dataclass(frozen=True, slots=True)
class InputField:
    """The declaration of a column. The column's name is the name of its field in ForwardInputs."""

    dtype: torch.dtype  # int64 or int32
    extent: Extent
    padding: int | Padding  # the values after the last real value, in captured steps
    grouped: bool = False  # if true, each group of layers has an array of its own
    recurrent: bool = False  # if true, only models with recurrent layers have the column
    in_c: bool = False  # if true, the C library reads the column


def columns_of(record: type) -> dict[str, InputField]:
    """Returns the columns that a dataclass declares as `name: Annotated[type, InputField(...)]`, by name, in order."""
    declared: dict[str, Any] = {item.name: item.type for item in fields(record)}
    found = {name: getattr(annotated, "__metadata__", (None,))[0] for name, annotated in declared.items()}
    return {name: column for name, column in found.items() if column is not None}


TOKENS, SEQUENCES, BOUNDS, LOGITS = Extent
SCRATCH_SLOT, COMPUTED = Padding


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The T tokens (rows) of S sequences. Sequence s has the rows query_start_loc[s] .. query_start_loc[s+1] - 1.

    Row query_start_loc[s] + i is at position seq_lens[s] - (query_start_loc[s+1] - query_start_loc[s]) + i. It attends
    to the K/V of all positions up to its own, inclusively, because its K/V is written before attention. The K/V of
    position p of sequence s is in page page_table[s, p // page_size] at offset p % page_size, for each group of layers.

    Layers with a recurrent state read the state before a sequence's rows from the sequence's slot in `read_slots`, and
    write the state after these rows to its slot in `write_slots`. No slot is both written and read in a step.
    """

    token_ids: Annotated[Tensor, InputField(int64, TOKENS, 0)]
    positions: Annotated[Tensor, InputField(int64, TOKENS, 0, in_c=True)]
    # the slot where the K/V of each token is written: page * page_size + offset
    slot_mappings: Annotated[tuple[Tensor, ...], InputField(int64, TOKENS, SCRATCH_SLOT, grouped=True, in_c=True)]
    query_start_loc: Annotated[Tensor, InputField(int32, BOUNDS, COMPUTED, in_c=True)]
    seq_lens: Annotated[Tensor, InputField(int32, SEQUENCES, COMPUTED, in_c=True)]  # the tokens of this step included
    page_tables: tuple[Tensor, ...]  # [S, P] int32; 0 (scratch page) after the last page, and before a window
    # the rows whose logits are returned, in ascending order
    logits_indices: Annotated[Tensor, InputField(int64, LOGITS, COMPUTED, in_c=True)]
    max_kv_len: int  # at least the largest of seq_lens
    max_pages: tuple[int, ...] = ()  # the highest page in each page table
    # NO_STATE for a sequence that begins; None if the model has no recurrent layers
    read_slots: Annotated[Tensor | None, InputField(int32, SEQUENCES, NO_STATE, recurrent=True, in_c=True)] = None
    write_slots: Annotated[Tensor | None, InputField(int32, SEQUENCES, SCRATCH, recurrent=True, in_c=True)] = None
    # [T] int32: each row attends to this many keys of its sequence; None: to the keys up to its own position
    bidirectional_end: Tensor | None = None
    rotary: Tensor | None = None  # [T, D] int64, with M-RoPE: the position at which each rotary column is read
    rope_rows: Tensor | None = None  # [T] int64, with M-RoPE: the row of `rotary` for each token
    replaced: tuple[Tensor, Tensor] | None = None  # rows [N], and the vectors [N, H] that replace their embeddings
    added: tuple[Tensor, ...] = ()  # [i]: vectors [N, H] that are added to the replaced rows after layer i
    first: Tensor | None = None  # [T, K]: input of the first layer's mixer, in place of the normed embeddings
    any_rows: bool = False  # whether logits_indices may be other than 0 .. T - 1 even if its length is T
    of_layers: Tensor | None = None  # [T, L, P]: per-layer embeddings that another process has computed
    # (layer, tensor [R, H]): the tensor gets the layer's rows with logits
    aux_hidden_states: tuple[tuple[int, Tensor], ...] = ()
    # [T] int64: the row of logits of the step before that a token was sampled from; negative: the host knew the token
    sources: Tensor | None = None  # None: the host knew all tokens

    @property
    def state_slots(self) -> StateSlots | None:
        if self.read_slots is None or self.write_slots is None:
            return None
        return StateSlots(self.read_slots, self.write_slots, self.query_start_loc)

    @property
    def all_logits(self) -> bool:
        """Whether logits_indices has every row. Compares only shapes, so it does not synchronize with the device."""
        return not self.any_rows and self.logits_indices.shape == self.token_ids.shape

    @property
    def few_logits(self) -> bool:
        """Whether dropping the rows without logits early saves time. Compares only shapes, without synchronizing."""
        return 2 * self.logits_indices.shape[0] <= self.token_ids.shape[0]

    def only_logits(self) -> "ForwardInputs":
        """Returns inputs with only the rows that have logits, each row as a sequence, for layers that write no K/V.

        Does not synchronize with the device.
        """
        rows, device = self.logits_indices, self.positions.device
        sequences = torch.searchsorted(self.query_start_loc, rows, right=True) - 1
        of = {TOKENS: rows, SEQUENCES: sequences}
        columns: dict[str, Any] = {
            name: _picked(getattr(self, name), of[column.extent], grouped=column.grouped)
            for name, column in COLUMNS.items()
            if column.extent in of and not column.recurrent
        }
        columns |= {name: None for name, column in COLUMNS.items() if column.recurrent}
        columns["query_start_loc"] = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
        columns["seq_lens"] = (columns["positions"] + 1).int()
        columns |= {"logits_indices": torch.arange(len(rows), device=device), "any_rows": False}
        columns["bidirectional_end"] = None if self.bidirectional_end is None else self.bidirectional_end[rows]
        columns["rope_rows"] = None if self.rope_rows is None else self.rope_rows[rows]
        return replace(self, **columns, first=None, page_tables=tuple(table[sequences] for table in self.page_tables))


def _picked(values: Any, indices: Tensor, *, grouped: bool) -> Any:
    return tuple(each[indices] for each in values) if grouped else values[indices]


COLUMNS = columns_of(ForwardInputs)


# What a model is to the code that runs its steps: the decoder, in PyTorch or in C, and one that is cut into stages.


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
