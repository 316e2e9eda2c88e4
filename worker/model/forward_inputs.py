"""The model's only input: the tokens of a step laid end to end, without padding and without masks.

run/inputs.py builds it from a plan; model/decoder.py and the attention kernels read it.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """T tokens of S sequences; sequence s has the rows query_start_loc[s] .. query_start_loc[s+1].

    Row query_start_loc[s] + i is at position seq_lens[s] - (query_start_loc[s+1] - query_start_loc[s]) + i and attends
    to the K/V of positions 0 .. its own (its own K/V is written before attention). Position p of sequence s is stored
    in page page_table[s, p // page_size] at offset p % page_size.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: page * page_size + offset, where this token's K/V goes
    query_start_loc: Tensor  # [S+1] int32
    seq_lens: Tensor  # [S] int32, the tokens of this step included
    page_table: Tensor  # [S, P] int32, short rows end in page 0 (scratch)
    logits_indices: Tensor  # [R] int64, ascending: the rows whose logits are returned
    max_kv_len: int  # at least the largest of seq_lens
    max_page: int = 0  # the highest page in page_table

    @property
    def all_logits(self) -> bool:
        """Whether logits_indices names every row. Compares shapes only, so it does not synchronize with the device."""
        return len(self.logits_indices) == len(self.token_ids)
