"""Dummy steps of the self-test: no two rows write to the same slot, and no row writes to the padding's slot."""

import pytest
import torch

from worker.model_runner.cuda_graphs import dummy_decodes, dummy_mixed, same_bits
from worker.model_runner.inputs import prepare_batch, slot_mappings, token_ids


@pytest.mark.parametrize("kind", [dummy_decodes, dummy_mixed])
@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("page_size", [16, 64])
def test_dummy_steps_write_slots_of_their_own(kind: object, most: int, page_size: int) -> None:
    first, second = (kind(page_size, 2, seed, most) for seed in (0, 4))  # type: ignore[operator]
    layouts = [prepare_batch(plan.chunks, page_size)[0] for plan in (first, second)]
    for each in layouts:
        mappings = slot_mappings(each)
        assert len(each.seq_lens) <= most and len(mappings) == 2
        slots = mappings[0].tolist()
        assert len(set(slots)) == len(slots) and max(slots) < page_size - 1
    assert token_ids(layouts[0]).tolist() != token_ids(layouts[1]).tolist()


def test_mixed_dummy_step_needs_room_in_a_page() -> None:
    assert dummy_mixed(8, 1, 0, 64) is None
    plan = dummy_mixed(16, 1, 0, 64)
    assert plan is not None and len({chunk.length for chunk in plan.chunks}) > 1


def test_same_bits_distinguishes_zeros_and_equates_nans() -> None:
    nan = torch.tensor([torch.nan])
    assert same_bits(nan, nan.clone()) and not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
