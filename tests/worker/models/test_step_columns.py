"""The table of columns lists the columns that ForwardInputs declares."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from worker.models.forward_inputs import COLUMNS, Extent, InputField, Padding, columns_of


def test_columns_of_returns_what_is_annotated_in_order() -> None:
    first, second = InputField(torch.int64, Extent.TOKENS, 0), InputField(torch.int32, Extent.BOUNDS, Padding.COMPUTED)

    @dataclass
    class Record:
        a: Annotated[Tensor, first]
        size: int
        b: Annotated[Tensor | None, second] = None

    assert list(columns_of(Record).items()) == [("a", first), ("b", second)]


def test_step_has_the_documented_columns() -> None:
    lengths = {name: column.extent.value for name, column in COLUMNS.items()}
    assert lengths == {
        "token_ids": "T", "positions": "T", "slot_mappings": "T", "query_start_loc": "S + 1", "seq_lens": "S",
        "logits_indices": "R", "read_slots": "S", "write_slots": "S",
    }  # fmt: skip
    assert [name for name, column in COLUMNS.items() if column.recurrent] == ["read_slots", "write_slots"]
    assert [name for name, column in COLUMNS.items() if column.grouped] == ["slot_mappings"]
    assert [name for name, column in COLUMNS.items() if not column.in_c] == ["token_ids"]
