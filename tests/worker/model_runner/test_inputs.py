"""A plan laid out as tensors agrees, token by token, with the definition in worker/models/forward_inputs.py."""

from array import array

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Sampling
from worker.model_runner.inputs import build_inputs
from worker.scheduler.sequence import Chunk, Plan, PromptScores, Sequence

CPU = torch.device("cpu")


def make(tokens: int, computed: int, page_size: int, first_page: int, **options: bool) -> Sequence:
    pages = array("i", list(range(first_page, first_page + -(-tokens // page_size)))[::-1])
    return Sequence(
        (b"f", first_page), [(7 * i + first_page) % 1000 for i in range(tokens)], tokens,
        Sampling(4, **options), 0, computed_tokens=computed,
        pages=[pages, array("i", [page + 1000 for page in pages])],
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Chunk]]:
    page_size = draw(st.sampled_from([1, 3, 16]))
    chunks, page = [], 1
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 40))
        length = draw(st.integers(1, 40))
        rest = draw(st.integers(0, 3))
        sequence = make(start + length + rest, start, page_size, page, prompt_logprobs=draw(st.booleans()))
        sequence.scores = PromptScores(draw(st.integers(0, sequence.prompt_len - 1)))
        page += len(sequence.pages[0])
        chunks.append(Chunk(sequence, start, length, rest == 0))
    return page_size, chunks


@settings(max_examples=60, deadline=None)
@given(plans())
def test_build_inputs_places_every_row_as_forward_inputs_defines(plan: tuple[int, list[Chunk]]) -> None:
    page_size, chunks = plan
    packed, wanted = build_inputs(chunks, page_size, CPU)
    row = 0
    for s, chunk in enumerate(chunks):
        sequence = chunk.sequence
        assert packed.query_start_loc[s] == row and packed.seq_lens[s] == chunk.start + chunk.length
        for position in range(chunk.start, chunk.start + chunk.length):
            assert packed.token_ids[row] == sequence.tokens[position]
            assert packed.positions[row] == position
            for group, pages in enumerate(sequence.pages):
                page = pages[position // page_size]
                assert packed.slot_mappings[group][row] == page * page_size + position % page_size
                assert packed.page_tables[group][s, position // page_size] == page
            row += 1
    assert packed.query_start_loc[-1] == row == len(packed.token_ids)
    assert packed.max_pages == tuple(int(table.max()) for table in packed.page_tables)
    assert packed.max_kv_len == int(packed.seq_lens.max())
    assert packed.all_logits == (packed.logits_indices.tolist() == list(range(row)))
    ends = [int(packed.query_start_loc[s + 1]) - 1 for s, chunk in enumerate(chunks) if chunk.samples]
    assert [int(packed.logits_indices[at]) for at in wanted.sampled] == ends


@settings(max_examples=60, deadline=None)
@given(plans())
def test_prompt_logprobs_use_the_row_before_each_known_token(plan: tuple[int, list[Chunk]]) -> None:
    page_size, chunks = plan
    packed, wanted = build_inputs(chunks, page_size, CPU)
    told = {index: (first, count) for index, first, count in wanted.prompts}
    for index, chunk in enumerate(chunks):
        begin = max(chunk.start + 1, chunk.sequence.scores.start if chunk.sequence.scores else 0)
        predicted = range(begin, min(chunk.start + chunk.length + 1, chunk.sequence.prompt_len))
        if not chunk.sequence.sampling.prompt_logprobs or not predicted:
            assert index not in told
            continue
        first, count = told[index]
        rows = packed.logits_indices[first : first + count]
        assert (packed.positions[rows] + 1).tolist() == list(predicted)


def test_drafts_follow_the_last_token_with_a_row_each() -> None:
    drafting, other = make(8, 7, 16, 1), make(3, 2, 16, 2)
    prompt = make(30, 0, 16, 3, prompt_logprobs=True)
    chunks = [Chunk(drafting, 7, 4, True, (91, 92, 93)), Chunk(other, 2, 1, True), Chunk(prompt, 0, 30, True)]
    packed, wanted = build_inputs(chunks, 16, CPU)
    assert packed.token_ids[:5].tolist() == [drafting.tokens[7], 91, 92, 93, other.tokens[2]]
    assert packed.positions[:5].tolist() == [7, 8, 9, 10, 2]
    assert packed.slot_mappings[0][:4].tolist() == [16 + 7, 16 + 8, 16 + 9, 16 + 10]
    assert packed.query_start_loc.tolist() == [0, 4, 5, 35] and packed.seq_lens.tolist() == [11, 3, 30]
    assert packed.logits_indices.tolist() == list(range(35))
    assert wanted.sampled == [0, 1, 2, 3, 4, 34] and wanted.prompts == [(2, 5, 29)]
    assert Plan(chunks).rows == [
        *((drafting, at, (91, 92, 93)[:at]) for at in range(4)), (other, 0, ()), (prompt, 0, ())
    ]  # fmt: skip
