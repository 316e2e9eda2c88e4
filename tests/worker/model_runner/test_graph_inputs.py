"""Steps laid out at fixed addresses equal the results of build_inputs, while sequences arrive, leave and grow."""

from array import array
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Sampling
from worker.model_runner.cuda_graph_inputs import (
    ALIGN,
    KNOWN,
    Blocks,
    DevicePageTables,
    GraphInputs,
    HostInputs,
    Shape,
    inputs_bytes,
    views_of,
)
from worker.model_runner.inputs import build_inputs, lay_out_decodes, pending_tokens, prepare_batch
from worker.models.forward_inputs import ForwardInputs
from worker.ops.recurrent_state import NO_STATE
from worker.scheduler.sequence import Chunk, Sequence, SequenceStates, slots_of

CPU = torch.device("cpu")
PAGES, GROUPS = 8, 2
REST = {"page_tables": (), "max_kv_len": 128}  # fields of ForwardInputs that are not columns
DECODES, MIXED = Shape(6, 6, 6, 128), Shape(40, 7, 16, 128)


def sequence(id: int, length: int, page_size: int) -> Sequence:
    pages = [array("i", range(begin, begin + -(-length // page_size))) for begin in (1 + 100 * id, 5001 + 100 * id)]
    tokens, slots = [7 * id + i for i in range(length)], [2 * id, 2 * id + 1]
    states = dict.fromkeys(range(length), slots[0])
    return Sequence((b"f", id), tokens, 1, Sampling(50), id, pages=pages, states=SequenceStates(states, slots[1:]))


def decodes(sequences: list[Sequence]) -> list[Chunk]:
    return [Chunk(one, len(one.tokens) + one.pending_outputs - 1, 1, True) for one in sequences]


class Static:
    """Memory at fixed addresses on a device, to which steps of one shape are copied."""

    def __init__(self, shape: Shape, page_size: int) -> None:
        self.shape, self.page_size = shape, page_size
        self.blocks = Blocks(inputs_bytes(shape, GROUPS), CPU)
        self.table_rows = DevicePageTables(shape.sequences, PAGES, GROUPS, CPU)
        self._host = [
            HostInputs(block, shape, GROUPS, page_size=page_size, scratch=self.table_rows.scratch, recurrent=True)
            for block in self.blocks.on_host
        ]

    def send(self, chunks: list[Chunk], before: list[Chunk]) -> GraphInputs:
        size = self.page_size
        layout = prepare_batch(chunks, size)[0] if self.shape.mixed else lay_out_decodes(chunks, size)
        numbers = self.table_rows.rows_of(chunks, size)
        host = self._host[self.blocks.next()]
        host.fill(layout, pending_tokens(chunks, before), numbers)
        self.blocks.send(inputs_bytes(self.shape, GROUPS))
        return GraphInputs.of(self.blocks.on_device, self.shape, GROUPS)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 16]), st.sampled_from([DECODES, MIXED]))
def test_sent_columns_equal_build_inputs_and_the_rest_is_padding(
    data: st.DataObject, page_size: int, shape: Shape
) -> None:
    static, most = Static(shape, page_size), PAGES * page_size
    running: list[Sequence] = []
    count = 0
    for _ in range(8):
        left = data.draw(st.sets(st.integers(0, 6)))
        running = [one for at, one in enumerate(running) if at not in left and len(one.tokens) < most]
        for _ in range(data.draw(st.integers(not running, 6 - len(running)))):
            count += 1
            running.append(sequence(count, data.draw(st.integers(1, most)), page_size))
        chunks = decodes(running)
        if shape.mixed:
            starts = [max(0, len(one.tokens) - data.draw(st.integers(1, 6))) for one in running]
            chunks = [Chunk(one, at, len(one.tokens) - at, True) for one, at in zip(running, starts, strict=True)]
        check(static, static.send(chunks, []), chunks)
        for one in running:
            one.tokens.append(len(one.tokens))
            own = slots_of(one)
            one.states = SequenceStates(dict.fromkeys(range(len(one.tokens)), own.free[0]), [own.at[0]])
            for group, pages in enumerate(one.pages):
                if len(one.tokens) > len(pages) * page_size:
                    pages.append(1000 * (group + 1) + one.key[1])


def check(static: Static, sent: GraphInputs, chunks: list[Chunk]) -> None:
    wanted, _ = build_inputs(chunks, static.page_size, CPU, recurrent=True)
    got, n, tokens = ForwardInputs(**sent.forward_columns(recurrent=True), **REST), len(chunks), len(wanted.token_ids)
    assert wanted.read_slots is not None and got.read_slots is not None
    assert wanted.write_slots is not None and got.write_slots is not None
    assert torch.equal(got.read_slots[:n], wanted.read_slots) and (got.read_slots[n:] == NO_STATE).all()
    assert torch.equal(got.write_slots[:n], wanted.write_slots) and not got.write_slots[n:].any()
    for name in ("token_ids", "positions"):
        assert torch.equal(getattr(got, name)[:tokens], getattr(wanted, name)), name
        assert not getattr(got, name)[tokens:].any(), f"{name} of padding"
    for slots, expected in zip(got.slot_mappings, wanted.slot_mappings, strict=True):
        assert torch.equal(slots[:tokens], expected) and (slots[tokens:] == static.page_size - 1).all()
    for table, expected in zip(static.table_rows.tables, wanted.page_tables, strict=True):
        for row, chunk in enumerate(chunks):
            used = -(-(chunk.start + chunk.length) // static.page_size)
            assert torch.equal(table[sent.table_rows[row]][:used], expected[row][:used])
        assert not table[sent.table_rows[n:].long()].any()
    assert torch.equal(got.seq_lens[:n], wanted.seq_lens) and torch.equal(
        got.query_start_loc[: n + 1], wanted.query_start_loc
    )
    assert torch.equal(got.logits_indices[: len(wanted.logits_indices)], wanted.logits_indices)
    assert (sent.sources == KNOWN).all()
    lengths = got.query_start_loc.diff()
    assert (got.seq_lens >= lengths).all() and lengths.sum() == static.shape.tokens == got.query_start_loc[-1]
    assert torch.equal(lengths[n:], got.seq_lens[n:]), "sequences of padding begin at position 0"
    assert (lengths == 1).all() or (static.shape.mixed and not lengths[n:-1].any())


def test_pending_token_has_its_source_among_the_last_ids() -> None:
    a, b, c, prompt = (sequence(id, 5, 16) for id in range(1, 5))
    before = [Chunk(a, 4, 1, True), Chunk(prompt, 0, 3, False), Chunk(b, 4, 1, True), Chunk(c, 0, 5, True)]
    b.pending_outputs = c.pending_outputs = 1
    for one in (b, c):
        slots_of(one).at = dict.fromkeys(range(6), 0)
    got = Static(DECODES, 16).send(decodes([c, a, b]), before)
    assert got.sources.tolist() == [2, KNOWN, 1, *[KNOWN] * 3]
    (token_ids,), (positions,) = got.columns["token_ids"], got.columns["positions"]
    assert token_ids[1] == a.tokens[-1] and positions[:3].tolist() == [5, 4, 5]


def test_columns_are_aligned_and_do_not_overlap() -> None:
    for lengths in ((1, 1), (3, 7), (64, 1000)):
        layout = [(str(length), dtype, length) for length in lengths for dtype in (torch.int64, torch.int32)]
        block = torch.zeros(1 << 15, dtype=torch.uint8)
        views = [view for _, view in views_of(block, iter(layout))]
        assert all((view.data_ptr() - block.data_ptr()) % ALIGN == 0 for view in views)
        spans = [(view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()) for view in views]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_block_is_not_filled_again_before_the_other_one() -> None:
    blocks = Blocks(ALIGN, CPU)
    assert blocks.next() != blocks.next()
