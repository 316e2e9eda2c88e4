"""What a column of a step is: an array with an element for each token, sequence or row of logits.

forward_inputs.py declares the columns, each in one place. These follow from the declarations: the tensors of a step
(worker/run/inputs.py), the blocks of captured steps with their padding (worker/run/graphs/graph_inputs.py), and what
the C library reads (columns_in_c.py).
"""

from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any

import torch


class Extent(StrEnum):
    """The length of a column, in a step of T tokens in S sequences with R rows of logits."""

    TOKENS = "T"
    SEQUENCES = "S"
    BOUNDS = "S + 1"
    LOGITS = "R"


class Padding(Enum):
    """The values of padding that are not one number for all steps."""

    SCRATCH_SLOT = "the last slot of the scratch page"
    COMPUTED = (
        "what makes sequences of the padding: a function of worker/run/graphs/graph_inputs.py for this column alone"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column, as it is declared. Its name is that of the field."""

    dtype: torch.dtype  # int64 or int32
    extent: Extent
    padding: int | Padding  # the values after the last real one, in captured steps
    grouped: bool = False  # whether each group of layers has one of its own
    recurrent: bool = False  # whether only models with recurrent layers have it
    in_c: bool = False  # whether the C library reads it


def columns_of(record: type) -> dict[str, Column]:
    """Returns the columns that a dataclass declares as `name: Annotated[type, Column(...)]`, by name, in order."""
    declared: dict[str, Any] = {item.name: item.type for item in fields(record)}
    found = {name: getattr(annotated, "__metadata__", (None,))[0] for name, annotated in declared.items()}
    return {name: column for name, column in found.items() if column is not None}
