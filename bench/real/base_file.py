"""The file of a full model's log-probabilities, in `llama-perplexity`'s format.

Sluice's and llama.cpp's predictions are compared with this file. It has the ids of all windows of the text, so that
both engines predict the same tokens. Only the second half of a window is predicted, so that each token has some text
before it. Log-probabilities are stored in 16 bits, as equal steps of a row's range. The range is at most 16 nats; less
likely tokens are left out, as in llama.cpp.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAGIC = b"_logits_"
RANGE, STEPS = 16.0, 65_535
ROWS_AT_ONCE = 256  # how many rows of a vocabulary are computed with at once, because many do not fit in memory
LEFT_OUT = -1e4  # log-probability of tokens that are left out: their probability becomes 0

Window = list[int]  # token ids


def first_predicted(window: int) -> int:
    """Returns the index of the first token whose logits are scored. These logits predict the token after it."""
    return window // 2


def write(path: Path, windows: Sequence[Window], vocab: int, logits: Iterable[Tensor]) -> None:
    """Writes windows of equal length and their predictions.
    logits: for each window, the logits [R, vocab] of its second half without the last token."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(MAGIC + struct.pack("<iii", len(windows[0]), vocab, len(windows)))
        file.write(np.array(windows, "<i4").tobytes())
        for rows in logits:
            for first in range(0, len(rows), ROWS_AT_ONCE):
                file.write(_encoded(rows[first : first + ROWS_AT_ONCE]).tobytes())
    new.rename(path)


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A base file, memory-mapped for reading."""

    windows: list[Window]
    # [windows, R, 4 + vocab]: 4 columns hold two float32 (step size, minimum), the others hold steps
    rows: npt.NDArray[np.uint16]
    vocab: int

    @classmethod
    def open(cls, path: Path) -> "BaseFile":
        with path.open("rb") as file:
            magic, head = file.read(len(MAGIC)), file.read(12)
            assert magic == MAGIC, f"{path} is no file of log-probabilities"
            window, vocab, count = struct.unpack("<iii", head)
            windows = np.fromfile(file, "<i4", window * count).reshape(count, window).tolist()
            shape = (count, window - 1 - first_predicted(window), _width(vocab))
            rows = np.memmap(path, np.uint16, "r", file.tell(), shape)
        return cls(windows, rows, vocab)

    def log_probabilities(self, index: int, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the log-probabilities of rows [first, end) of one window, [R, vocab] float32. Tokens left out get the
        row's minimum.
        """
        rows = torch.from_numpy(self.rows[index, first:end].copy())
        head = rows[:, :4].contiguous().view(torch.float32)
        found: Tensor = rows[:, 4 : 4 + self.vocab].float() * head[:, :1] + head[:, 1:]
        return found


def without_tail(log_probabilities: Tensor) -> Tensor:
    """Sets the probability of tokens that were left out to 0, as llama.cpp does to compute KL."""
    return log_probabilities.masked_fill(log_probabilities <= -RANGE, LEFT_OUT)


def _width(vocab: int) -> int:
    return 4 + 2 * ((vocab + 1) // 2)


def _encoded(logits: Tensor) -> npt.NDArray[np.uint16]:
    highest = logits.amax(1, keepdim=True)
    lowest = torch.maximum(logits.amin(1, keepdim=True), highest - RANGE)
    scale = (highest - lowest) / STEPS
    rows = np.zeros((len(logits), _width(logits.shape[1])), np.uint16)
    rows[:, :4] = torch.cat((scale, lowest - logits.logsumexp(1, keepdim=True)), 1).numpy().view(np.uint16)
    steps = ((logits - lowest) / scale).round_().clamp_(0, STEPS)
    rows[:, 4 : 4 + logits.shape[1]] = steps.to(torch.int32).numpy()
    return rows
