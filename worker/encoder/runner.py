"""Runs the steps of an encoder. A step has whole texts, packed by tokens; there are no pages and nothing is sampled."""

from itertools import accumulate

import numpy as np
import torch

from shared.messages import Sampling
from worker.encoder.encoder import Encoder, Texts
from worker.model_runner.runner import DeviceBroken
from worker.model_runner.step import AnyStep, ComputedStep, PooledRows, StepOutput
from worker.scheduler.sequence import Chunk, Plan, Sequence


class EncoderRunner:
    """Computes the steps of an encoder. A step is complete when it is launched, and its results are vectors."""

    vision = None  # encoders see no images
    cuts_prompts = False  # a text is computed as a whole, because its first tokens attend to its last ones

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def launch(self, plan: Plan, before: AnyStep | None = None) -> ComputedStep:
        """Computes the texts of a plan. Catches no exception. Never changes a sequence."""
        sequences = [chunk.sequence for chunk in plan.chunks]
        for chunk in plan.chunks:
            if chunk.start or chunk.length != len(chunk.sequence.tokens):
                raise ValueError("an encoder computes whole texts")
        hidden = self._encoder.hidden(_texts(sequences, typed=self._encoder.spec.token_types > 1))
        begins = accumulate((len(sequence.tokens) for sequence in sequences), initial=0)
        pooled: list[PooledRows] = []
        for sequence, begin in zip(sequences, begins, strict=False):
            if sequence.pooling is not None:
                rows = hidden[begin : begin + len(sequence.tokens)]
                pooled.append((sequence, 0, self._encoder.pooled(rows, sequence.pooling)))
        return ComputedStep(plan, StepOutput([], pooled=pooled))

    def check_device(self) -> None:
        """Computes a text of one token. Raises DeviceBroken if this fails."""
        try:
            self.launch(Plan([Chunk(Sequence((b"", 0), [0], 1, Sampling(0), 0), 0, 1, False)]))
        except Exception as error:
            raise DeviceBroken(f"the CPU cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers_started(self) -> int:
        """How many layers all steps have started so far. The count grows during a long step, but not during a hang."""
        return int(self._encoder.layers_started.value)


def _texts(sequences: list[Sequence], *, typed: bool) -> Texts:
    """typed: whether the encoder tells the texts of a pair apart"""
    lengths = [len(sequence.tokens) for sequence in sequences]
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    ids = np.fromiter((token for sequence in sequences for token in sequence.tokens), np.int64, int(starts[-1]))
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    types = None
    if typed and any([sequence.second_from for sequence in sequences]):
        begins = np.repeat([sequence.second_from or len(sequence.tokens) for sequence in sequences], lengths)
        types = torch.from_numpy((places >= begins).astype(np.int64))
    return Texts(torch.from_numpy(ids), torch.from_numpy(places), types, torch.from_numpy(starts))
