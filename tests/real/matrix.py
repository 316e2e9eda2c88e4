"""Compares the bits of a request of the real model in all modes: batching, chunking, pages, company and drafts."""

from pathlib import Path

import pytest
import torch

from shared.gguf.translated import translated
from tests.real.report import Row
from tests.worker.matrix import Mode, assert_same_bits
from tests.worker.model_runner.harness import batch_invariant_decoder


def check(file: Path, dtype: torch.dtype, modes: list[Mode]) -> Row:
    """Compares bitwise the logits of all positions in each mode with the logits when the request runs alone."""
    row = Row(f"the matrix of modes, {str(dtype).removeprefix('torch.')}", f"{len(modes)} modes with the default one")
    decoder = batch_invariant_decoder(translated([file]), dtype)
    with pytest.MonkeyPatch.context() as patch:
        try:
            assert_same_bits(decoder, modes, patch)
        except AssertionError as differs:
            row.wrong.append(f"bits depend on the mode: {differs}")
    return row
