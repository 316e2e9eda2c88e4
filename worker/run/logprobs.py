"""The log-probabilities that requests ask for, as messages. Knows logits, sequences and plans; decides nothing."""

import torch
from torch import Tensor

from shared import messages as m
from shared.codec import pack_f32, pack_u32
from worker.kernels.sample import logprobs as row_logprobs
from worker.run.pack import Wanted
from worker.schedule.plan import Plan
from worker.schedule.sequence import Sequence


def output_logprobs(logits: Tensor, ids: list[int], sequences: list[Sequence]) -> list[tuple[Sequence, m.Logprobs]]:
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    if not rows:
        return []
    top = max(sequences[row].sampling.logprobs or 0 for row in rows)
    chosen, top_ids, top_values = row_logprobs(
        logits[rows], torch.tensor([ids[row] for row in rows], device=logits.device), top
    )
    told = []
    for at, row in enumerate(rows):
        sequence = sequences[row]
        k = sequence.sampling.logprobs or 0
        told.append(
            (
                sequence,
                _message(sequence, sequence.output_len, chosen[at : at + 1], top_ids[at, :k], top_values[at, :k]),
            )
        )
    return told


def prompt_logprobs(logits: Tensor, wanted: Wanted, plan: Plan) -> list[tuple[Sequence, m.Logprobs]]:
    told = []
    for index, first, count in wanted.prompts:
        chunk = plan.chunks[index]
        sequence, start = chunk.sequence, chunk.start + 1
        k = sequence.sampling.logprobs or 0
        targets = torch.tensor(sequence.tokens[start : start + count], device=logits.device)
        chosen, top_ids, top_values = row_logprobs(logits[first : first + count], targets, k)
        told.append((sequence, _message(sequence, start, chosen, top_ids, top_values, prompt=True)))
    return told


def _message(
    sequence: Sequence, start: int, chosen: Tensor, top_ids: Tensor, top: Tensor, *, prompt: bool = False
) -> m.Logprobs:
    return m.Logprobs(
        sequence.key[1],
        start,
        pack_f32(chosen.tolist()),
        top_ids.shape[-1],
        pack_u32(top_ids.flatten().tolist()),
        pack_f32(top.flatten().tolist()),
        prompt,
    )
