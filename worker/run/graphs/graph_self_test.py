"""Dummy steps for the self-test of graphs: decodes, and a mixed step.

They compute in the scratch page. Each token of a step needs its own slot there. The last slot is not used, because
padding writes to it.
"""

import torch
from torch import Tensor

from shared.messages import Sampling
from worker.run.inputs import dummy_sequence
from worker.schedule.sequence import Chunk, Plan

MIXED_LENGTHS = (3, 1, 1, 4)  # the lengths of the chunks of a mixed step; the first length varies with `seed`
MOST_SLOTS = 12  # the maximum number of slots that a dummy step writes


def dummy_decodes(page_size: int, groups: int, seed: int, most: int) -> Plan:
    """Returns decodes of up to four sequences. Half of them are sampled at random."""
    return _dummy_plan([1] * max(1, min(page_size - 1, most, 4)), page_size, groups, seed)


def dummy_mixed(page_size: int, groups: int, seed: int, most: int) -> Plan | None:
    """Returns chunks of one and of several tokens, for at most `most` sequences; None if a page is too small."""
    lengths = [MIXED_LENGTHS[0] + seed % 3, *MIXED_LENGTHS[1:]][-most:]
    return _dummy_plan(lengths, page_size, groups, seed) if page_size > MOST_SLOTS else None


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two float32 tensors are equal bit by bit. Waits for the device."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


def _dummy_plan(lengths: list[int], page_size: int, groups: int, seed: int) -> Plan:
    chunks, start = [], 0
    for number, length in enumerate(lengths):
        tokens = [seed + i for i in range(start + length)]
        sampling = Sampling(1, temperature=0.9 * (number % 2))
        sequence = dummy_sequence(tokens, page_size, groups, sampling, seed=seed + number)
        chunks.append(Chunk(sequence, start, length, True))
        start += length
    return Plan(chunks)
