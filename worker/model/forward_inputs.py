"""The only input of the model: the tokens of all sequences of a step, concatenated, without padding or masks.

run/inputs.py builds it from a plan; model/decoder.py and the attention kernels read it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.kernels.recurrent_state import StateSlots


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The T tokens (rows) of S sequences. Sequence s has the rows query_start_loc[s] .. query_start_loc[s+1] - 1.

    Row query_start_loc[s] + i is at position seq_lens[s] - (query_start_loc[s+1] - query_start_loc[s]) + i. It attends
    to the K/V of all positions up to and including this one, because its K/V is written before attention. The K/V of
    position p of sequence s is in page page_table[s, p // page_size] at offset p % page_size. Each group of
    layers has a page table and slots of its own (worker/kv_cache/groups.py).

    Layers with a recurrent state begin a sequence's rows with the state in its slot of `read_slots`, and write the
    state after them to its slot of `write_slots`. No slot is both written and read in a step.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mappings: tuple[Tensor, ...]  # [T] int64: where the K/V of the token is written, page * page_size + offset
    query_start_loc: Tensor  # [S+1] int32
    seq_lens: Tensor  # [S] int32, including the tokens of this step
    page_tables: tuple[Tensor, ...]  # [S, P] int32; page 0 (scratch) after the last page, and behind a group's window
    logits_indices: Tensor  # [R] int64, ascending: the rows whose logits are returned
    max_kv_len: int  # at least the largest of seq_lens
    max_pages: tuple[int, ...] = ()  # the highest page in each page table
    read_slots: Tensor | None = None  # [S] int32, NO_STATE for a sequence that begins; None without such layers
    write_slots: Tensor | None = None  # [S] int32

    @property
    def state_slots(self) -> StateSlots | None:
        if self.read_slots is None or self.write_slots is None:
            return None
        return StateSlots(self.read_slots, self.write_slots, self.query_start_loc)

    @property
    def all_logits(self) -> bool:
        """Whether logits_indices has every row. Compares only shapes, so it does not synchronize with the device."""
        return len(self.logits_indices) == len(self.token_ids)

    @property
    def few_logits(self) -> bool:
        """Whether most rows have no logits, so that dropping them early pays. Compares only shapes, as `all_logits`."""
        return 2 * len(self.logits_indices) <= len(self.token_ids)

    def only_logits(self) -> "ForwardInputs":
        """Returns the inputs of the rows with logits alone, each a sequence of one row, for layers that write nothing.

        Does not synchronize with the device.
        """
        rows, device = self.logits_indices, self.positions.device
        sequences = torch.searchsorted(self.query_start_loc, rows, right=True) - 1
        positions = self.positions[rows]
        return replace(
            self, token_ids=self.token_ids[rows], positions=positions,
            slot_mappings=tuple(slots[rows] for slots in self.slot_mappings),
            query_start_loc=torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
            seq_lens=(positions + 1).int(), page_tables=tuple(table[sequences] for table in self.page_tables),
            logits_indices=torch.arange(len(rows), device=device), read_slots=None, write_slots=None,
        )  # fmt: skip
