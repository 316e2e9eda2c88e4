"""Runs `worker.follower`, a rank of a worker, and flips one bit in its computations when a test asks for it.

`python -m tests.e2e.broken_rank FILE ...`: further arguments go to worker.follower. FILE holds one of the words below,
which says which bit to flip. The rank removes FILE, so that the rank of the next worker is not broken.
"""

import sys
from pathlib import Path
from typing import Any

STREAM, WEIGHTS = "stream", "weights"


def flip(tensor: Any) -> None:
    import torch

    tensor.view(-1).view(torch.uint8)[0] ^= 1


def make_breakable(file: Path) -> None:
    """Patches this process, which is a rank, so that a test can break it with a file."""
    from worker import follower
    from worker.distributed.exchange import PartDecoder

    hidden, load = PartDecoder.hidden, follower.load

    def asked(word: str) -> bool:
        if not file.exists() or file.read_text() != word:
            return False
        file.unlink()
        return True

    def wrong_hidden(self: Any, inputs: Any, **given: Any) -> Any:
        if asked(STREAM):
            flip(self._layers._decoder.weights.norm)  # every rank holds the final norm
        return hidden(self, inputs, **given)

    def wrong_load(*given: Any, **named: Any) -> Any:
        weights = load(*given, **named)
        if asked(WEIGHTS):
            (first, *_) = weights.layers[len(weights.layers) // 2].mixer.linears
            flip(first.cpu.parts[0].panels)
        return weights

    PartDecoder.hidden, follower.load = wrong_hidden, wrong_load  # type: ignore[method-assign]


if __name__ == "__main__":
    from worker.follower import start

    make_breakable(Path(sys.argv[1]))
    start(sys.argv[2:])
