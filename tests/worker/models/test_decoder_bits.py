"""Whole decoders compute the same bits with all instruction sets that promise the same bits."""

from pathlib import Path

import pytest

from tests.worker.models.decoder_bits import read, write
from tests.worker.ops.harness.cpu_tiers import FASTER, use
from worker.ops.native_build import EXTENDS


@pytest.mark.skipif(not FASTER, reason="this processor has no such instruction set")
def test_decoders_compute_the_same_bits(tmp_path: Path) -> None:
    write(tmp_path, ["lfm2"], ["llama-biased"])
    for faster in FASTER:
        with use(faster):
            found = list(read(tmp_path))
        with use(EXTENDS[faster]):
            assert found == list(read(tmp_path)) and len({*found}) == 4
