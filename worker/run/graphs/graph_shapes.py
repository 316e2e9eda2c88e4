"""Lists the shapes of the steps that are captured as CUDA graphs, and finds the shape that a step is padded to.

There are two kinds of shapes. In a decode step, each sequence has one row, which is sampled. Every other step is a
mixed step: it has prompt chunks or drafts, usually together with decodes. Steps with more than MOST_TOKENS tokens, and
steps that would have too much padding, have no shape and run without a graph.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences of a decode step
DECODE_KV_LENS = (512, 4096, 32768)  # values of max_kv_len for decode steps, besides the maximum sequence length
TOKENS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # tokens of a mixed step
MIXED_KV_LENS = (4096,)  # values of max_kv_len for mixed steps, besides the maximum sequence length
MOST_TOKENS = TOKENS[-1]  # a larger step needs no graph: it computes for longer than the host needs to launch it
FEW_SEQUENCES = 16  # sequences of mixed steps with few decodes, so that the output head and sampling have few rows
FEW_ROWS = 64  # this many rows of logits cost hardly more than one, because reading the head's weights dominates
FREE_PADDING = 512  # up to this many tokens, padding costs less time than launching every kernel from the host
PADDING_SHARE = 4  # in a step of more tokens, at most 1 / PADDING_SHARE may be padding


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a captured step. Smaller steps are padded to these sizes."""

    tokens: int
    sequences: int  # in a mixed step, this includes one sequence for the padding tokens
    rows: int  # rows of logits
    max_kv_len: int  # the maximum number of positions that a sequence attends to

    @property
    def mixed(self) -> bool:
        """Whether a sequence may have several tokens, or none. Attention makes the same comparison."""
        return self.tokens > self.sequences

    def __str__(self) -> str:
        kind = f"{self.tokens} tokens of {self.sequences - 1} sequences" if self.mixed else f"{self.tokens} decodes"
        return f"{kind} of up to {self.max_kv_len} positions"


class Shapes:
    """All shapes of a worker, for steps of up to `max_batch_size` sequences and `max_step_tokens` tokens."""

    def __init__(self, max_batch_size: int, max_step_tokens: int, max_seq_len: int) -> None:
        self.max_batch_size, self._max_step_tokens, self._max_seq_len = max_batch_size, max_step_tokens, max_seq_len
        self._batch_sizes, self._decode_kv_lens = batch_sizes(max_batch_size), self._kv_lens(DECODE_KV_LENS)
        self._mixed = list(self._mixed_shapes())
        self.most_rows = max([max_batch_size, *(shape.rows for shape in self._mixed)])
        self.longest = max([max_seq_len, *(shape.max_kv_len for shape in self._mixed)])  # the largest max_kv_len

    def decode(self, sequences: int, longest: int) -> Shape | None:
        """Returns the shape for decodes that attend to at most `longest` positions, or None."""
        if sequences > self.max_batch_size or longest > self._max_seq_len:
            return None
        size = self._batch_sizes[bisect_left(self._batch_sizes, sequences)]
        return Shape(size, size, size, self._decode_kv_lens[bisect_left(self._decode_kv_lens, longest)])

    def mixed(self, tokens: int, sequences: int, rows: int, longest: int, *, apart: bool = False) -> Shape | None:
        """Returns the smallest shape for a mixed step, or None. rows: the number of rows of logits.

        apart: whether the shape must have fewer rows of logits than tokens
        """
        for shape in self._mixed:
            fits = tokens <= shape.tokens and sequences < shape.sequences and rows <= shape.rows
            if apart and shape.rows == shape.tokens:
                continue
            if fits and longest <= shape.max_kv_len:
                least = 0 if shape.tokens <= FREE_PADDING else shape.tokens - shape.tokens // PADDING_SHARE
                return shape if tokens >= least else None
        return None

    def all_shapes(self) -> Iterator[Shape]:
        """Yields every shape: first decodes, then mixed steps, each from the largest to the smallest.

        The memory that graphs share therefore has its final size after the first shapes.
        """
        for size, kv_len in product(reversed(self._batch_sizes), reversed(self._decode_kv_lens)):
            yield Shape(size, size, size, kv_len)
        yield from reversed(self._mixed)

    def _kv_lens(self, bounds: tuple[int, ...]) -> list[int]:
        return [*(bound for bound in bounds if bound < self._max_seq_len), self._max_seq_len]

    def _mixed_shapes(self) -> Iterator[Shape]:
        most = min(self._max_step_tokens, MOST_TOKENS)
        for tokens in [*(size for size in TOKENS if size < most), most]:
            many = min(tokens * 3 // 4, self.max_batch_size)
            for sequences in sorted({min(many, FEW_SEQUENCES), many} if many > FEW_ROWS else {many}):
                if sequences + 1 < tokens:
                    rows = max(sequences, min(tokens, FEW_ROWS))
                    lens = self._kv_lens(MIXED_KV_LENS)
                    yield from (Shape(tokens, sequences + 1, rows, max(kv_len, tokens)) for kv_len in lens)


def batch_sizes(most: int) -> list[int]:
    """Returns the batch sizes that decodes and sampling are padded to, in ascending order up to `most`."""
    larger = range(BATCH_SIZES[-1] + 128, most, 128)
    return [*(size for size in (*BATCH_SIZES, *larger) if size < most), most]
