"""One forward per step: pack the plan, run the model, sample every row that reached its end.

Knows tensors and plans; decides nothing. The same path for prefill, chunk and decode.
"""

from array import array
from dataclasses import dataclass, field

import torch

from shared import messages as m
from worker.memory.cache import Cache
from worker.memory.pages import SCRATCH
from worker.model.decoder import Decoder
from worker.run.constrain import Constrainer
from worker.run.logprobs import output_logprobs, prompt_logprobs
from worker.run.pack import pack
from worker.run.sampler import sample
from worker.schedule.plan import Chunk, Plan
from worker.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next id of each sampling chunk, in plan order, and the log-probabilities that were asked for."""

    ids: list[int]
    logprobs: list[tuple[Sequence, m.Logprobs]] = field(default_factory=list)


class DeviceBroken(Exception):
    """It cannot even compute a step that is nobody's, so it cannot compute anybody's."""


class Runner:
    """A model and its K/V pool on one device."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._forward = model.on(cache)
        self._device = cache.k.device
        self._constrainer = Constrainer(model.spec.vocab_size, model.spec.eos_ids)

    @torch.inference_mode()
    def step(self, plan: Plan) -> Sampled:
        """Compute the plan's chunks; raises whatever the device raises, having changed no sequence."""
        packed, wanted = pack(plan.chunks, self._cache.page_size, self._device)
        self._cache.reach(packed.max_page)
        logits = self._forward(packed)  # [R, V] float32
        sampled = logits if len(wanted.sampled) == logits.shape[0] else logits[wanted.sampled]
        sequences = [chunk.sequence for chunk in plan.sampling]
        allowed = self._constrainer.apply(sampled, sequences)
        ids = sample(allowed, sequences, self._model.spec.eos_ids) if sequences else []
        told = output_logprobs(sampled, ids, sequences) + prompt_logprobs(logits, wanted, plan)
        return Sampled(ids, told)

    def prove(self) -> None:
        """One step for nobody: a token computed in the scratch page. Raises DeviceBroken, or hangs, if it cannot be."""
        sampling = m.Sampling(1, temperature=0.0)
        nobody = Sequence((b"", 0), [0], 1, sampling, seed=0, arrival=0.0, pages=array("i", [SCRATCH]))
        try:
            self.step(Plan([Chunk(nobody, 0, 1, True)]))
        except Exception as error:
            raise DeviceBroken(f"{self._device} cannot compute: {type(error).__name__}: {error}") from error

    @property
    def layers(self) -> int:
        """How many were begun in all steps so far, those of a step that runs now too: a long step is no hanging one."""
        return int(self._model.done.value)
