"""Decodes laid out at fixed addresses against build_inputs, while sequences arrive, leave and grow."""

from array import array
from dataclasses import fields
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Sampling
from worker.kernels.recurrent_state import NO_STATE
from worker.run.graph_inputs import ALIGN, BY_GROUP, KNOWN, GraphInputs, HostBlock, block_bytes
from worker.run.inputs import build_inputs
from worker.run.sampler import sampling_params
from worker.schedule.sequence import Chunk, Plan, Sequence

CPU = torch.device("cpu")
BATCH, PAGES, GROUPS = 6, 8, 2


def sequence(id: int, length: int, page_size: int) -> Sequence:
    sampling = Sampling(
        50, temperature=0.1 * id, top_k=id % 4, top_p=1 - 0.01 * (id % 7), min_p=0.01 * (id % 3)
    )  # fmt: skip
    pages = [array("i", range(begin, begin + -(-length // page_size))) for begin in (1 + 100 * id, 5001 + 100 * id)]
    tokens, slots = [7 * id + i for i in range(length)], [2 * id, 2 * id + 1]
    return Sequence(
        (b"f", id), tokens, 1, sampling, id << 62, 0.0, pages=pages, states={length - 1: slots[0]}, free_slots=slots[1:]
    )


def decodes(sequences: list[Sequence]) -> list[Chunk]:
    return [Chunk(one, len(one.tokens) + one.pending_outputs - 1, 1, True) for one in sequences]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 16]))
def test_host_block_equals_build_inputs(data: st.DataObject, page_size: int) -> None:
    staging, block = (
        HostBlock(BATCH, PAGES, GROUPS, CPU, recurrent=True),
        torch.zeros(block_bytes(BATCH, PAGES, GROUPS), dtype=torch.uint8),
    )
    most = PAGES * page_size
    running: list[Sequence] = []
    count = 0
    for _ in range(8):
        left = data.draw(st.sets(st.integers(0, BATCH)))
        running = [one for at, one in enumerate(running) if at not in left and len(one.tokens) < most]
        for _ in range(data.draw(st.integers(not running, BATCH - len(running)))):
            count += 1
            running.append(sequence(count, data.draw(st.integers(1, most)), page_size))
        chunks = decodes(running)
        staging.fill(chunks, [], page_size)
        staging.send(block)
        check(GraphInputs.of(block, BATCH, PAGES, GROUPS), chunks, running, page_size)
        for one in running:
            one.tokens.append(len(one.tokens))
            one.states, one.free_slots = {len(one.tokens) - 1: one.free_slots[0]}, list(one.states.values())
            for group, pages in enumerate(one.pages):
                if len(one.tokens) > len(pages) * page_size:
                    pages.append(1000 * (group + 1) + one.key[1])


def check(got: GraphInputs, chunks: list[Chunk], running: list[Sequence], page_size: int) -> None:
    packed, _ = build_inputs(chunks, page_size, CPU, recurrent=True)
    n, width = packed.page_tables[0].shape
    assert packed.read_slots is not None and packed.write_slots is not None
    assert torch.equal(got.read_slots[:n], packed.read_slots) and (got.read_slots[n:] == NO_STATE).all()
    assert torch.equal(got.write_slots[:n], packed.write_slots) and not got.write_slots[n:].any()
    for name in ("token_ids", "positions", "seq_lens"):
        assert torch.equal(getattr(got, name)[:n], getattr(packed, name)), name
    for slots, expected in zip(got.slot_mappings, packed.slot_mappings, strict=True):
        assert torch.equal(slots[:n], expected) and not slots[n:].any()
    for table, expected in zip(got.page_tables, packed.page_tables, strict=True):
        assert torch.equal(table[:n, :width], expected) and not table[:, width:].any() and not table[n:].any()
    wanted = sampling_params(Plan(chunks).rows, (), CPU).plain
    for item in fields(wanted):
        assert torch.equal(getattr(got.sampling, item.name)[:n], getattr(wanted, item.name)), item.name
    assert (got.sources == KNOWN).all()
    for name in ("token_ids", "positions", "temperature", "output_positions"):
        assert not getattr(got, name)[n:].any(), f"{name} of padding"
    assert (got.seq_lens[n:] == 1).all() and (got.top_p[n:] == 1).all()


def test_pending_token_has_its_source_among_the_last_ids() -> None:
    a, b, c, prompt = (sequence(id, 5, 16) for id in range(1, 5))
    before = [Chunk(a, 4, 1, True), Chunk(prompt, 0, 3, False), Chunk(b, 4, 1, True), Chunk(c, 0, 5, True)]
    b.pending_outputs = c.pending_outputs = 1
    staging, block = (
        HostBlock(BATCH, PAGES, GROUPS, CPU),
        torch.zeros(block_bytes(BATCH, PAGES, GROUPS), dtype=torch.uint8),
    )
    staging.fill(decodes([c, a, b]), before, 16)
    staging.send(block)
    got = GraphInputs.of(block, BATCH, PAGES, GROUPS)
    assert got.sources.tolist() == [2, KNOWN, 1, *[KNOWN] * 3]
    assert got.token_ids[1] == a.tokens[-1] and got.positions[:3].tolist() == [5, 4, 5]
    assert got.output_positions[:3].tolist() == [5, 4, 5], "as many as there are when it is sampled"


def test_columns_are_aligned_and_do_not_overlap() -> None:
    for batch in (1, 3, 64):
        size = block_bytes(batch, 5, GROUPS)
        block = torch.zeros(size, dtype=torch.uint8)
        got = GraphInputs.of(block, batch, 5, GROUPS)
        views = [getattr(got, item.name) for item in fields(GraphInputs) if item.name not in BY_GROUP]
        views += [*got.slot_mappings, *got.page_tables]
        for view in views:
            assert (view.data_ptr() - block.data_ptr()) % ALIGN == 0
            view.fill_(1)
        assert sum(view.numel() * view.element_size() for view in views) <= size
        spans = sorted((view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()) for view in views)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
