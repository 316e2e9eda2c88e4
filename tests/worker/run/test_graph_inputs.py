"""Decodes laid out at fixed addresses against build_inputs, while sequences arrive, leave and grow."""

from array import array
from dataclasses import fields
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Sampling
from worker.run.graph_inputs import ALIGN, KNOWN, GraphInputs, HostBlock, block_bytes
from worker.run.inputs import build_inputs
from worker.run.sampler import sampling_params
from worker.schedule.sequence import Chunk, Plan, Sequence

CPU = torch.device("cpu")
BATCH, PAGES = 6, 8


def sequence(id: int, length: int, page_size: int) -> Sequence:
    sampling = Sampling(
        50, temperature=0.1 * id, top_k=id % 4, top_p=1 - 0.01 * (id % 7), min_p=0.01 * (id % 3)
    )  # fmt: skip
    pages = array("i", range(1 + 100 * id, 1 + 100 * id + -(-length // page_size)))
    return Sequence((b"f", id), [7 * id + i for i in range(length)], 1, sampling, id << 62, 0.0, pages=pages)


def decodes(sequences: list[Sequence]) -> list[Chunk]:
    return [Chunk(one, len(one.tokens) + one.pending_outputs - 1, 1, True) for one in sequences]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3, 16]))
def test_host_block_equals_build_inputs(data: st.DataObject, page_size: int) -> None:
    staging, block = HostBlock(BATCH, PAGES, CPU), torch.zeros(block_bytes(BATCH, PAGES), dtype=torch.uint8)
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
        check(GraphInputs.of(block, BATCH, PAGES), chunks, running, page_size)
        for one in running:
            one.tokens.append(len(one.tokens))
            if len(one.tokens) > len(one.pages) * page_size:
                one.pages.append(1000 + one.key[1])


def check(got: GraphInputs, chunks: list[Chunk], running: list[Sequence], page_size: int) -> None:
    packed, _ = build_inputs(chunks, page_size, CPU)
    n, width = packed.page_table.shape
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens"):
        assert torch.equal(getattr(got, name)[:n], getattr(packed, name)), name
    assert torch.equal(got.page_table[:n, :width], packed.page_table) and not got.page_table[:, width:].any()
    wanted = sampling_params(Plan(chunks).rows, (), CPU).plain
    for item in fields(wanted):
        assert torch.equal(getattr(got.sampling, item.name)[:n], getattr(wanted, item.name)), item.name
    assert (got.sources == KNOWN).all()
    for name in ("token_ids", "positions", "slot_mapping", "temperature", "output_positions", "page_table"):
        assert not getattr(got, name)[n:].any(), f"{name} of padding"
    assert (got.seq_lens[n:] == 1).all() and (got.top_p[n:] == 1).all()


def test_pending_token_has_its_source_among_the_last_ids() -> None:
    a, b, c, prompt = (sequence(id, 5, 16) for id in range(1, 5))
    before = [Chunk(a, 4, 1, True), Chunk(prompt, 0, 3, False), Chunk(b, 4, 1, True), Chunk(c, 0, 5, True)]
    b.pending_outputs = c.pending_outputs = 1
    staging, block = HostBlock(BATCH, PAGES, CPU), torch.zeros(block_bytes(BATCH, PAGES), dtype=torch.uint8)
    staging.fill(decodes([c, a, b]), before, 16)
    staging.send(block)
    got = GraphInputs.of(block, BATCH, PAGES)
    assert got.sources.tolist() == [2, KNOWN, 1, *[KNOWN] * 3]
    assert got.token_ids[1] == a.tokens[-1] and got.positions[:3].tolist() == [5, 4, 5]
    assert got.output_positions[:3].tolist() == [5, 4, 5], "as many as there are when it is sampled"


def test_columns_are_aligned_and_do_not_overlap() -> None:
    for batch in (1, 3, 64):
        size = block_bytes(batch, 5)
        block = torch.zeros(size, dtype=torch.uint8)
        views = [getattr(GraphInputs.of(block, batch, 5), item.name) for item in fields(GraphInputs)]
        for view in views:
            assert (view.data_ptr() - block.data_ptr()) % ALIGN == 0
            view.fill_(1)
        assert sum(view.numel() * view.element_size() for view in views) <= size
        spans = sorted((view.data_ptr(), view.data_ptr() + view.numel() * view.element_size()) for view in views)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
