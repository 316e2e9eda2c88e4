"""ForwardInputs: the rows that get logits, as derived from the shapes of the columns."""

import torch

from worker.models.forward_inputs import ForwardInputs


def inputs(logits: list[int]) -> ForwardInputs:
    longs, ints = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    return ForwardInputs(longs, longs, (longs,), ints, ints[:1], (ints[None],), torch.tensor(logits), max_kv_len=3)


def test_all_logits_is_true_only_if_every_row_is_named() -> None:
    assert inputs([0, 1, 2]).all_logits and not inputs([2]).all_logits


def test_few_logits_is_true_if_no_more_than_half_of_the_rows_are_named() -> None:
    assert inputs([2]).few_logits and inputs([]).few_logits and not inputs([1, 2]).few_logits


def test_only_logits_makes_each_row_with_logits_a_sequence_at_its_position() -> None:
    step = ForwardInputs(
        token_ids=torch.tensor([5, 6, 7, 8, 9]), positions=torch.tensor([3, 4, 5, 0, 1]),
        slot_mappings=(torch.tensor([19, 20, 21, 48, 49]),), query_start_loc=torch.tensor([0, 3, 5], dtype=torch.int32),
        seq_lens=torch.tensor([6, 2], dtype=torch.int32), page_tables=(torch.tensor([[1], [3]], dtype=torch.int32),),
        logits_indices=torch.tensor([1, 4]), max_kv_len=6,
    )  # fmt: skip
    alone = step.only_logits()
    assert alone.token_ids.tolist() == [6, 9] and alone.positions.tolist() == [4, 1]
    assert alone.query_start_loc.tolist() == [0, 1, 2] and alone.seq_lens.tolist() == [5, 2]
    assert alone.page_tables[0].tolist() == [[1], [3]] and alone.slot_mappings[0].tolist() == [20, 49]
    assert alone.all_logits and alone.page_tables[0].dtype == alone.seq_lens.dtype == torch.int32
