"""Defines a column of a step: an array with an element for each token, sequence or row of logits.

forward_inputs.py declares each column once. Three things follow from the declarations: the tensors of a step
(worker/run/inputs.py), the memory of captured steps with their padding (worker/run/graphs/graph_inputs.py), and the
structure that the C library reads (columns_in_c.py).
"""

from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from typing import Any

import torch


class Extent(StrEnum):
    """The length of a column. T: tokens of the step; S: sequences; R: rows with logits"""

    TOKENS = "T"
    SEQUENCES = "S"
    BOUNDS = "S + 1"
    LOGITS = "R"


class Padding(Enum):
    """How a column is padded where the padding is not one fixed number."""

    SCRATCH_SLOT = "the last slot of the scratch page"
    COMPUTED = (
        "what makes sequences of the padding: a function of worker/run/graphs/graph_inputs.py for this column alone"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """The declaration of a column. The column's name is the name of its field in ForwardInputs."""

    dtype: torch.dtype  # int64 or int32
    extent: Extent
    padding: int | Padding  # the values behind the last real value, in captured steps
    grouped: bool = False  # if true, each group of layers has an array of its own
    recurrent: bool = False  # if true, only models with recurrent layers have the column
    in_c: bool = False  # if true, the C library reads the column


def columns_of(record: type) -> dict[str, Column]:
    """Returns the columns that a dataclass declares as `name: Annotated[type, Column(...)]`, by name, in order."""
    declared: dict[str, Any] = {item.name: item.type for item in fields(record)}
    found = {name: getattr(annotated, "__metadata__", (None,))[0] for name, annotated in declared.items()}
    return {name: column for name, column in found.items() if column is not None}
