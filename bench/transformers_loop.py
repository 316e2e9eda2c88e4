"""The baseline: a plain, batched `transformers` generate loop on the same weights, without a server."""

import random
import time
from pathlib import Path

import torch

from bench.client.load_client import Record
from bench.client.workloads import FIRST_ID


class Generator:
    """One loaded model; `run` generates one batch of equally long prompts."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._vocab = self._model.config.vocab_size

    def run(self, batch: int, prompt: int, new: int) -> list[Record]:
        """Generates a batch. Returns records as clients of a server without overhead would see them: every row
        receives its token when the step ends."""
        rng = random.Random(batch)
        ids = torch.tensor([[rng.randrange(FIRST_ID, self._vocab) for _ in range(prompt)] for _ in range(batch)])
        stamps: list[float] = []
        start = time.perf_counter()

        def stamp(input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            stamps.append(time.perf_counter() - start)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            stopping_criteria=[stamp],
            pad_token_id=0,
        )
        done = time.perf_counter() - start
        return [Record(0.0, list(stamps), done, prompt, new) for _ in range(batch)]
