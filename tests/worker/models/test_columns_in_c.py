"""The structure that Python fills for the C library has the layout of the C header."""

import shutil
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest
import torch

from worker.models.cpu_decoder import HEADER, STEP_COLUMNS, columns_in_c, columns_struct, header, step_struct
from worker.models.forward_inputs import COLUMNS, Extent, ForwardInputs, InputField
from worker.ops.native_build import SOURCES

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
MARKS = InputField(torch.int32, Extent.SEQUENCES, -1, in_c=True)
TAGS = InputField(torch.int64, Extent.TOKENS, 0, grouped=True, in_c=True)
WIDER = {"tags": TAGS, **COLUMNS, "unread": InputField(torch.int64, Extent.TOKENS, 0), "marks": MARKS}


def offsets_in_c(folder: Path, struct: str, names: list[str]) -> list[int]:
    """Returns the offsets of a structure's fields as gcc lays them out. struct: its definition, with the name S"""
    lines = "".join(f'printf("%zu\\n", offsetof(S, {name}));' for name in names)
    headers = ["<stddef.h>", "<stdint.h>", "<stdio.h>", '"adapters/adapters.h"']
    included = "".join(f"#include {header}\n" for header in headers)
    program = f"{included}{struct}\nint main(void) {{ {lines} }}\n"
    (folder / "offsets.c").write_text(program)
    subprocess.run(["gcc", f"-I{folder}", f"-I{SOURCES}", "offsets.c", "-o", "offsets"], cwd=folder, check=True)
    return [int(line) for line in subprocess.run([folder / "offsets"], capture_output=True, check=True).stdout.split()]


def offsets(struct: type[Structure], names: list[str]) -> list[int]:
    return [int(getattr(struct, name).offset) for name in names]


def test_header_is_made_of_the_table() -> None:
    assert HEADER.read_text() == header(COLUMNS), "run python -m worker.models.cpu_decoder"


@needs_compiler
def test_added_columns_are_where_c_reads_them(tmp_path: Path) -> None:
    (tmp_path / "step_columns.h").write_text(header(WIDER))
    struct, names = columns_struct(WIDER), [name for name, column in WIDER.items() if column.in_c]
    assert {"tags", "marks"} < set(names) and "unread" not in names
    definition = 'typedef struct {\n#include "step_columns.h"\n} S;'
    assert offsets_in_c(tmp_path, definition, names) == offsets(struct, names)


@needs_compiler
def test_step_has_its_fields_where_c_reads_them(tmp_path: Path) -> None:
    source = (SOURCES / "decoder.c").read_text()
    end = source.index("} Step;")
    definition = source[source.rindex("typedef struct {", 0, end) : end] + "} S;"
    step = step_struct(STEP_COLUMNS)
    names = ["x", "own_columns", "inputs", "page_tables", "bidirectional_end", "cos", "added", "num_added", "t", "seqs"]
    names += ["page_table_stride", "num_outputs", "layers_of_all", "threads", "adapters"]
    columns = [name for name, column in COLUMNS.items() if column.in_c]
    begin = int(step.columns.offset)  # type: ignore[attr-defined]
    expected = [*offsets(step, names), *[begin + at for at in offsets(STEP_COLUMNS, columns)]]
    assert offsets_in_c(tmp_path, definition, [*names, *columns]) == expected


def inputs(**changed: object) -> ForwardInputs:
    columns = {
        "token_ids": torch.zeros(3, dtype=torch.int64), "positions": torch.arange(3),
        "query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([2, 1], dtype=torch.int32), "logits_indices": torch.tensor([1, 2]),
    }  # fmt: skip
    tables = 2 * (torch.zeros(2, 1, dtype=torch.int32),)
    more = {"slot_mappings": (torch.arange(3), torch.arange(3, 6)), "page_tables": tables, "max_kv_len": 2}
    return ForwardInputs(**columns | more | changed)  # type: ignore[arg-type]


def test_addresses_are_those_of_the_columns() -> None:
    step = inputs()
    made = columns_in_c(step)
    assert made.positions == step.positions.data_ptr() and made.seq_lens == step.seq_lens.data_ptr()
    assert [made.slot_mappings[group] for group in range(2)] == [slots.data_ptr() for slots in step.slot_mappings]
    assert made.read_slots is None and made.write_slots is None


@pytest.mark.parametrize(
    "changed",
    [
        {"positions": torch.arange(3, dtype=torch.int32)},
        {"positions": torch.arange(6)[::2]},
        {"query_start_loc": torch.tensor([0, 3], dtype=torch.int32)},
        {"read_slots": torch.zeros(3, dtype=torch.int32)},
        {"slot_mappings": (torch.arange(3),)},
    ],
    ids=["dtype", "stride", "length", "recurrent", "groups"],
)
def test_column_other_than_declared_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match=next(iter(changed))):
        columns_in_c(inputs(**changed))
