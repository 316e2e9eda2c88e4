"""The model's only input: a step's tokens laid end to end. No padding, no masks.

Made by run/pack.py from a plan, read by model/decoder.py and the attention kernels.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """T tokens of S sequences; sequence s owns rows starts[s] .. starts[s+1].

    Row starts[s] + i sits at position kv_lens[s] - (starts[s+1] - starts[s]) + i and attends to the K/V of
    positions 0 .. its own (its own K/V is written before attention). Position p of sequence s lives in page
    pages[s, p // page_size] at offset p % page_size.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: page * page_size + offset, where this token's K/V goes
    starts: Tensor  # [S+1] int32
    kv_lens: Tensor  # [S] int32, the tokens of this step included
    pages: Tensor  # [S, P] int32, short rows end in page 0 (scratch)
    rows: Tensor  # [R] int64, ascending: rows whose logits are wanted
    max_kv: int  # at least the longest kv_len
    max_page: int = 0  # highest page

    @property
    def whole(self) -> bool:
        """Whether the logits of every row are wanted; told by the shapes, so no device is asked."""
        return len(self.rows) == len(self.tokens)
