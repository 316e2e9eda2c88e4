"""A new column of a step needs only a line in the table and a function."""

from array import array
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from torch import Tensor

from shared.messages import Sampling
from worker.model_runner import inputs as run_inputs
from worker.model_runner.cuda_graph_inputs import Blocks, GraphInputs, HostInputs, Shape, inputs_bytes
from worker.model_runner.inputs import VALUES, BatchMetadata, build_inputs, lay_out_decodes, prepare_batch
from worker.models.forward_inputs import COLUMNS, Extent, ForwardInputs, InputField, Padding
from worker.scheduler.sequence import Chunk, Sequence, SequenceStates

CPU = torch.device("cpu")
GROUPS, PAGE_SIZE = 2, 16
MARKS = InputField(torch.int32, Extent.SEQUENCES, -7)
TAGS = InputField(torch.int64, Extent.TOKENS, Padding.SCRATCH_SLOT, grouped=True)
STATES = InputField(torch.int32, Extent.SEQUENCES, -1, recurrent=True)


@dataclass(frozen=True, slots=True)
class WiderInputs(ForwardInputs):
    marks: Annotated[Tensor | None, MARKS] = None
    tags: Annotated[tuple[Tensor, ...], TAGS] = ()
    states: Annotated[Tensor | None, STATES] = None


def marks(layout: BatchMetadata) -> object:
    return (layout.seq_lens * 10).astype("int32")


def tags(layout: BatchMetadata) -> object:
    return [layout.positions + 100 * group for group in range(layout.groups)]


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches the table, so that a step has three more columns."""
    for name, column, values in (("marks", MARKS, marks), ("tags", TAGS, tags), ("states", STATES, marks)):
        monkeypatch.setitem(COLUMNS, name, column)
        monkeypatch.setitem(VALUES, name, values)
    monkeypatch.setattr(run_inputs, "ForwardInputs", WiderInputs)


def chunks(*spans: tuple[int, int]) -> list[Chunk]:
    sequences = [
        Sequence((b"f", id), list(range(begin + length)), 1, Sampling(50), id, 0.0,
                 pages=[array("i", range(1, 9)) for _ in range(GROUPS)], states=SequenceStates({begin: 1}, [2]))
        for id, (begin, length) in enumerate(spans)
    ]  # fmt: skip
    return [Chunk(one, begin, length, True) for one, (begin, length) in zip(sequences, spans, strict=True)]


def test_every_column_has_a_function_and_its_declared_dtype_and_length() -> None:
    assert list(VALUES) == list(COLUMNS)
    step, _ = build_inputs(chunks((20, 1), (3, 4)), PAGE_SIZE, CPU, recurrent=True)
    lengths = {Extent.TOKENS: 5, Extent.SEQUENCES: 2, Extent.BOUNDS: 3, Extent.LOGITS: 2}
    for name, column in COLUMNS.items():
        found = getattr(step, name)
        for each in found if column.grouped else [found]:
            assert each.dtype == column.dtype and len(each) == lengths[column.extent], name


@pytest.mark.usefixtures("wider")
def test_added_column_arrives_in_the_inputs_of_a_step() -> None:
    step, _ = build_inputs(chunks((20, 1), (3, 4)), PAGE_SIZE, CPU)
    assert isinstance(step, WiderInputs) and step.marks is not None and step.states is None
    assert step.marks.tolist() == [210, 70]
    assert [each.tolist() for each in step.tags] == [[20, 3, 4, 5, 6], [120, 103, 104, 105, 106]]
    recurrent, _ = build_inputs(chunks((20, 1)), PAGE_SIZE, CPU, recurrent=True)
    assert isinstance(recurrent, WiderInputs) and recurrent.states is not None


@pytest.mark.usefixtures("wider")
def test_added_column_follows_the_rows_with_logits() -> None:
    step, _ = build_inputs(chunks((20, 1), (3, 4)), PAGE_SIZE, CPU, recurrent=True)
    alone = step.only_logits()
    assert isinstance(alone, WiderInputs) and alone.marks is not None and alone.states is None
    assert alone.marks.tolist() == [210, 70] and [each.tolist() for each in alone.tags] == [[20, 6], [120, 106]]


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("shape", [Shape(4, 4, 4, 128), Shape(12, 4, 6, 128)], ids=["decodes", "mixed"])
def test_added_column_arrives_in_a_block_with_its_padding(shape: Shape) -> None:
    block = Blocks(inputs_bytes(shape, GROUPS), CPU).on_host[0]
    host = HostInputs(block, shape, GROUPS, page_size=PAGE_SIZE, scratch=9, recurrent=True)
    step = chunks((20, 1), (3, 4)) if shape.mixed else chunks((20, 1), (3, 1))
    layout = prepare_batch(step, PAGE_SIZE)[0] if shape.mixed else lay_out_decodes(step, PAGE_SIZE)
    host.fill(layout, ([], []), [0, 1])
    columns = GraphInputs.of(block, shape, GROUPS).forward_columns(recurrent=True)
    ends = [210, 70] if shape.mixed else [210, 40]
    assert columns["marks"].tolist() == [*ends, -7, -7] and columns["states"].tolist() == [*ends, -1, -1]
    for group, found in enumerate(columns["tags"]):
        real = [position + 100 * group for position in ([20, 3, 4, 5, 6] if shape.mixed else [20, 3])]
        assert found.tolist() == [*real, *[PAGE_SIZE - 1] * (shape.tokens - len(real))]
    without = GraphInputs.of(block, shape, GROUPS).forward_columns(recurrent=False)
    assert "marks" in without and not {"states", "read_slots", "write_slots"} & set(without)
