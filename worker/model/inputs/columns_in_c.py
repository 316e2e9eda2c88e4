"""Passes the columns of a step to the C library, as a structure. Its C header is made from the columns' declarations.

python -m worker.model.inputs.columns_in_c    writes the header, csrc/step_columns.h
"""

from collections.abc import Mapping
from ctypes import POINTER, Structure, c_void_p
from typing import Any

import torch

from worker.kernels.cpu.build import SOURCES
from worker.kernels.cpu.decoder_c import pointers
from worker.model.inputs.forward_inputs import COLUMNS, ForwardInputs
from worker.model.inputs.step_columns import Column, Extent

HEADER = SOURCES / "step_columns.h"
TOP = """/* Fields of struct Step in decoder.c: the columns of T tokens in S sequences with R rows of logits.
 * Made from worker/model/inputs/forward_inputs.py by `python -m worker.model.inputs.columns_in_c`: do not edit. */
"""
TYPES = {torch.int64: "int64_t", torch.int32: "int32_t"}


def header(columns: Mapping[str, Column]) -> str:
    """Returns the text of csrc/step_columns.h: a field for each column that the C library reads, in order."""
    return TOP + "".join(_field(name, column) for name, column in columns.items() if column.in_c)


def _field(name: str, column: Column) -> str:
    each, pointers = ("each group of layers: ", "*const *") if column.grouped else ("", "*")
    none = "; NULL without recurrent layers" if column.recurrent else ""
    return f"const {TYPES[column.dtype]} {pointers}{name}; /* {each}[{column.extent}]{none} */\n"


def columns_struct(columns: Mapping[str, Column]) -> type[Structure]:
    """Returns a structure with the fields of csrc/step_columns.h."""
    read = {name: column for name, column in columns.items() if column.in_c}
    fields = [(name, POINTER(c_void_p) if column.grouped else c_void_p) for name, column in read.items()]
    return type("StepColumns", (Structure,), {"_fields_": fields})


STEP_COLUMNS = columns_struct(COLUMNS)


def columns_in_c(inputs: ForwardInputs) -> Structure:
    """Returns the addresses of the columns. They are valid as long as `inputs` exists.

    Raises AssertionError if a column's dtype or length differs from its declaration, or if a grouped column does not
    have one array for each group of layers.
    """
    lengths = {
        Extent.TOKENS: len(inputs.positions),
        Extent.SEQUENCES: len(inputs.seq_lens),
        Extent.BOUNDS: len(inputs.seq_lens) + 1,
        Extent.LOGITS: len(inputs.logits_indices),
    }
    assert all(len(table) == len(inputs.seq_lens) for table in inputs.page_tables)
    found: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        values: Any = getattr(inputs, name)
        if not column.in_c or (values is None and column.recurrent):
            continue
        assert not column.grouped or len(values) == len(inputs.page_tables), name
        for each in values if column.grouped else (values,):
            assert each.dtype == column.dtype and each.is_contiguous() and len(each) == lengths[column.extent], name
        found[name] = pointers(values) if column.grouped else values.data_ptr()
    return STEP_COLUMNS(**found)


if __name__ == "__main__":
    HEADER.write_text(header(COLUMNS))
