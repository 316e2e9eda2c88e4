"""Runs a decoder without a scheduler: every sequence owns all the pages it will need, in no order.

Each step takes one chunk of every sequence that still has tokens to compute, so that sequences of different lengths
mix prompt chunks with decodes.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.checkpoints import VOCAB
from worker.checkpoint.checkpoint import read_config
from worker.kv_cache.tensors import KVCache, kv_format
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import CpuDecoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.ops.recurrent_state import NO_STATE

CPU = torch.device("cpu")
SLOTS = 65  # slots of recurrent states: two for each of 32 sequences, and the scratch slot


@dataclass
class Row:
    """One sequence."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    # slots of the recurrent state: the first is written next, the second was written last
    slots: tuple[int, int] = (0, 0)

    @property
    def read_slot(self) -> int:
        return self.slots[1] if self.computed else NO_STATE

    def advance(self, length: int) -> None:
        """Records that a step has computed the next tokens of the sequence."""
        self.computed += length
        self.slots = self.slots[::-1]


def decoder_of(folder: Path, *, dtype: torch.dtype = torch.float32, positions: int = 512) -> Decoder:
    spec = spec_from_config(read_config(folder))
    return Decoder(spec, load(folder, spec, dtype, CPU, invariant=False), positions)


def cache_for(decoder: Decoder, *, tokens: int, page_size: int = 16, kept: str = "auto") -> KVCache:
    """Makes a cache for `tokens` tokens and the scratch page, full of NaN, so that reading unwritten values shows."""
    model = decoder.weights.embed.dtype
    cache = KVCache(
        decoder.spec, (1 + tokens // page_size,), page_size, kv_format(kept, model), CPU, state_slots=SLOTS,
        state_dtype=model,
    )  # fmt: skip
    for whole in (part.view(torch.uint8) for part in (*cache.k, *cache.v)):
        whole.fill_(255)  # NaN in every format, as a scale of codes, too
        whole[:, 0] = 0
    for state in cache.states.values():
        state.tail.fill_(torch.nan)
        state.memory.fill_(torch.nan)
    return cache


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def pack(chunks: list[tuple[Row, int]], page_size: int, *, all_rows: bool = False) -> ForwardInputs:
    """Makes a step of chunks (sequence, number of tokens), by the definitions in forward_inputs.py."""
    spans = [range(row.computed, row.computed + length) for row, length in chunks]
    starts = [sum(map(len, spans[:i])) for i in range(len(spans) + 1)]
    ends = [start - 1 for start, (row, length) in zip(starts[1:], chunks, strict=True)
            if row.computed + length == len(row.tokens)]  # fmt: skip
    widest = max(len(row.pages) for row, _ in chunks)
    return ForwardInputs(
        token_ids=torch.tensor([row.tokens[p] for (row, _), span in zip(chunks, spans, strict=True) for p in span]),
        positions=torch.tensor([p for span in spans for p in span]),
        slot_mappings=(torch.tensor([row.pages[p // page_size] * page_size + p % page_size
                            for (row, _), span in zip(chunks, spans, strict=True) for p in span]),),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
        page_tables=(
            torch.tensor([row.pages + [0] * (widest - len(row.pages)) for row, _ in chunks], dtype=torch.int32),
        ),
        logits_indices=torch.arange(starts[-1]) if all_rows else torch.tensor(ends, dtype=torch.int64),
        max_kv_len=max(span.stop for span in spans),
        read_slots=torch.tensor([row.read_slot for row, _ in chunks], dtype=torch.int32),
        write_slots=torch.tensor([row.slots[0] for row, _ in chunks], dtype=torch.int32),
    )  # fmt: skip


def advance(rows: list[Row], chunk: int) -> list[tuple[Row, int]]:
    return [(row, min(chunk, len(row.tokens) - row.computed)) for row in rows if row.computed < len(row.tokens)]


def rows_for(cache: KVCache, prompts: list[list[int]], room: int) -> list[Row]:
    """Makes a row for each prompt, with random pages for the prompt and `room` more tokens, and two state slots."""
    free = list(range(1, cache.pages[0]))
    random.Random(len(prompts)).shuffle(free)
    needs = [-(-(len(prompt) + room) // cache.page_size) for prompt in prompts]
    return [
        Row(list(prompt), [free.pop() for _ in range(need)], slots=(2 * index + 1, 2 * index + 2))
        for index, (prompt, need) in enumerate(zip(prompts, needs, strict=True))
    ]


def step(
    decoder: Decoder | CpuDecoder, cache: KVCache, rows: list[Row], chunk: int, *, all_rows: bool = False
) -> Tensor:
    """Runs a forward over the next chunk of every row, and advances the rows. Returns its logits."""
    chunks = [(row, min(chunk, len(row.tokens) - row.computed)) for row in rows]
    logits = decoder.forward(pack(chunks, cache.page_size, all_rows=all_rows), cache)
    for row, length in chunks:
        row.advance(length)
    return logits


def run_greedy(decoder: Decoder, cache: KVCache, prompts: list[list[int]], n: int, chunk: int) -> list[list[int]]:
    """Returns the first n greedy ids after each prompt."""
    rows = rows_for(cache, prompts, n)
    ends = {id(row): len(row.tokens) + n for row in rows}
    while active := [row for row in rows if len(row.tokens) < ends[id(row)]]:
        ids = step(decoder, cache, active, chunk).argmax(-1).tolist()
        sampling = [row for row in active if row.computed == len(row.tokens)]
        for row, token in zip(sampling, ids, strict=True):
            row.tokens.append(token)
    return [row.tokens[len(prompt):] for row, prompt in zip(rows, prompts, strict=True)]  # fmt: skip


def all_logits(decoder: Decoder | CpuDecoder, cache: KVCache, prompts: list[list[int]], chunk: int) -> list[Tensor]:
    """Logits of every prompt token, [len(prompt), vocab] each."""
    rows = rows_for(cache, prompts, 0)
    while active := [row for row in rows if row.computed < len(row.tokens)]:
        before = [row.computed for row in active]
        logits = step(decoder, cache, active, chunk, all_rows=True)
        parts = logits.split_with_sizes([row.computed - start for row, start in zip(active, before, strict=True)])
        for row, part in zip(active, parts, strict=True):
            row.logits.append(part)
    return [torch.cat(row.logits) for row in rows]


class Oracle:
    """The model of a checkpoint in transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        (name,) = read_config(folder)["architectures"]  # not every class is in AutoModelForCausalLM
        self.model: Any = getattr(transformers, name).from_pretrained(folder, dtype=dtype)
        self.model.generation_config.eos_token_id = None  # generate the requested length, past end tokens

    @torch.no_grad()
    def logits(self, prompt: list[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([prompt])).logits[0]
        return logits.float()

    def choices(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Returns the greedy id at each position of an answer after the ids before, by one pass over prompt and answer.

        By induction, these ids equal the answer if and only if `greedy` gives this answer.
        """
        return self.logits(prompt + answer[:-1]).argmax(-1).tolist()[len(prompt) - 1:]  # fmt: skip

    @torch.no_grad()
    def greedy(self, prompt: list[int], n: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)
        answer: list[int] = out[0, len(prompt):].tolist()  # fmt: skip
        return answer
