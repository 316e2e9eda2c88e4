"""The file of log-probabilities, in the format that llama.cpp's own programs read and write."""

from pathlib import Path

import pytest
import torch

from bench.client.server import BenchError
from bench.real.base_file import LEFT_OUT, BaseFile, first_predicted, without_tail, write
from bench.real.text import paragraphs, windows_of


@pytest.mark.parametrize("vocab", [96, 97])
def test_written_log_probabilities_are_read_again(tmp_path: Path, vocab: int) -> None:
    torch.manual_seed(0)
    windows = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]]
    logits = [3 * torch.randn(3, vocab) for _ in windows]
    logits[1][2, 5] -= 40
    write(tmp_path / "x.base", windows, vocab, logits)
    found = BaseFile.open(tmp_path / "x.base")
    assert found.windows == windows and first_predicted(8) == 4
    assert without_tail(found.log_probabilities(1))[2, 5] == LEFT_OUT
    for index, rows in enumerate(logits):
        wanted, got = rows.log_softmax(-1), without_tail(found.log_probabilities(index))
        kept = got != LEFT_OUT
        torch.testing.assert_close(got[kept], wanted[kept], atol=2e-4, rtol=0)
        assert bool((wanted[~kept] < -15.9).all())


def test_paragraphs_are_joined_lines() -> None:
    assert paragraphs("\r\n\r\n  Alice was\r\nvery  tired\r\n\r\n\r\n`Oh!'\r\n") == "Alice was very tired\n\n`Oh!'"


def test_windows_are_spread_over_the_text_and_begin_as_the_tokenizer_says() -> None:
    assert windows_of(list(range(20)), 3, 2, None) == [[0, 1, 2], [9, 10, 11]]
    assert windows_of(list(range(20)), 3, 2, 99) == [[99, 1, 2], [99, 10, 11]]
    with pytest.raises(BenchError, match="6 windows of 3 tokens"):
        windows_of(list(range(20)), 3, 7, None)
