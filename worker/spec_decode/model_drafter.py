"""Proposes drafts with a draft model: a small model that has the vocabulary of the served model.

It has its own K/V cache, and drafts for all sequences at once. A draft is sampled like the token itself, with the same
parameters, seed and position, so it is accepted often at any temperature. Drafts are guesses and change no answer.
"""

import json
import logging
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from shared.config.settings import FLAG, ModelConfig, read_speculative_config
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.checkpoint.checkpoint import CheckpointError, resolve
from worker.kv_cache.pages import PagePool
from worker.kv_cache.sizing import configured_budget
from worker.kv_cache.tensors import KVCache, bytes_per_page, one_group
from worker.model_runner.runner import Runner
from worker.model_runner.step import AnyStep
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import Model
from worker.scheduler.sequence import TILE, Chunk, Plan, Sequence, SequenceStates, with_biases_of
from worker.spec import ModelSpec

# The draft model's data for each sequence that it drafts for: the tokens, K/V pages and recurrent states.


def sampling_of_drafts(sampling: Sampling) -> Sampling:
    """Returns how drafts are sampled: as the tokens themselves, but without log-probabilities, which nobody reads, and
    without penalties, whose counts follow only tokens that stay."""
    return msgspec.structs.replace(
        sampling, prompt_logprobs=False, logprobs=None,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    )  # fmt: skip


SLOTS_EACH = 3  # slots for recurrent states: one for the state after the known tokens, one to read, one to write


@dataclass(slots=True, eq=False)
class DraftSequence:
    """The draft model's copy of a sequence of the served model, the target.

    `own.tokens` are the tokens of the target, followed by drafts. The first `own.computed_tokens` of them have K/V in
    the drafter's pages, and the first `known` of these are not drafts. Recurrent layers keep the state after `known`.
    """

    own: Sequence
    known: int = 0

    @classmethod
    def of(cls, target: Sequence) -> "DraftSequence":
        own = Sequence(
            target.key, list(target.tokens), target.prompt_len, sampling_of_drafts(target.sampling), target.seed
        )
        own.logits_processing = with_biases_of(target.logits_processing, own.logits_processing)
        own.pages = [array("i")]
        return cls(own)

    @property
    def left(self) -> int:
        return self.own.uncomputed_tokens

    def follow(self, tokens: list[int]) -> None:
        """Takes over the tokens of the target, which may only grow between calls. Forgets the K/V of wrong drafts.

        At least the last token remains uncomputed, because its row gives the first draft.
        """
        own = self.own
        same = min(self.known, len(tokens) - 1)
        if own.states is None:
            most = min(own.computed_tokens, len(tokens) - 1)
            while same < most and own.tokens[same] == tokens[same]:
                same += 1
        elif same < self.known:  # there is no state for the position before the last token
            same = 0
        own.tokens[:] = tokens
        own.computed_tokens = same
        self.known = min(self.known, same)
        self._keep_states(same)

    def computed(self, end: int, *, known: bool) -> None:
        """Notes that the first `end` tokens are computed. known: whether none of them is a draft."""
        own = self.own
        if own.states is not None:
            own.states.at[end] = own.states.free.pop()
        own.computed_tokens = end
        self.known = end if known else self.known
        self._keep_states(self.known, end)

    def _keep_states(self, *positions: int) -> None:
        """Keeps the states after these numbers of tokens, and frees the slots of all other states."""
        states = self.own.states
        if states is not None:
            states.free += [slot for at, slot in states.at.items() if at not in positions]
            states.at = {at: slot for at, slot in states.at.items() if at in positions}


class DraftSequences:
    """Gives pages and slots to the sequences of a drafter, and takes them back when a target has ended.

    slots: the pool of slots for recurrent states; None if the draft model has no recurrent layers.
    """

    def __init__(self, pool: PagePool, slots: PagePool | None) -> None:
        self._pool, self._slots = pool, slots
        self._held: dict[Sequence, DraftSequence] = {}  # target → its draft sequence

    def __len__(self) -> int:
        return len(self._held)

    def get(self, target: Sequence, room: int) -> DraftSequence | None:
        """Returns the draft sequence of a target, with pages for `room` tokens; None if the memory does not suffice."""
        held = self._held.get(target) or self._new(target)
        return held if held is not None and grow(held.own.pages[0], self._pool, room) else None

    def forget(self, target: Sequence) -> None:
        """Frees the pages and slots of a target, if it has any."""
        held = self._held.pop(target, None)
        if held is not None:
            self._pool.release(held.own.pages[0])
            if self._slots is not None and held.own.states is not None:
                self._slots.release([*held.own.states.free, *held.own.states.at.values()])

    def _new(self, target: Sequence) -> DraftSequence | None:
        held = DraftSequence.of(target)
        if self._slots is not None:
            free = self._slots.acquire(SLOTS_EACH)
            if free is None:
                return None
            held.own.states = SequenceStates({}, free)
        self._held[target] = held
        return held


# The base class of drafters that run a model: it sizes their K/V cache, and an error in a drafter ends no request.

log = logging.getLogger("sluice.drafts")
PAGE_SIZE = 16  # tokens
Device = torch.device | str


class NeuralDrafter(ABC):
    """Proposes tokens with a model. After the model has failed once, it proposes nothing any more."""

    name: str  # the name of the model in the log
    steps: "DraftRunner"
    failed = False
    seconds = 0.0  # the duration of the last propose()

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Returns drafts for each sequence, () for none. wanted: (sequence, maximum number of drafts) pairs."""
        nothing: list[tuple[int, ...]] = [()] * len(wanted)
        if self.failed:
            return nothing
        begun = time.perf_counter()
        try:
            return self._propose(wanted)
        except Exception:
            log.exception("%s failed, and drafts no more", self.name)
            self.failed = True
            return nothing
        finally:
            self.seconds = time.perf_counter() - begun

    def capture_graphs(self, on_progress: Callable[[], None]) -> None:
        self.steps.runner.capture_graphs(on_progress)

    @abstractmethod
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Computes the result of `propose`. May raise any exception."""


def page_count(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int, device: Device = "cpu") -> int:
    """Returns how many pages a drafter's pool has: as many as fit in `pool_bytes`, but enough for one sequence.

    A sequence has up to `longest` tokens. The pool has no more pages than TILE sequences need. One page is the scratch
    page.
    """
    each = -(-longest // PAGE_SIZE)
    affordable = pool_bytes // max(1, bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, device))
    return 1 + max(each, min(TILE * each, affordable))


def cache_bytes(spec: ModelSpec, dtype: torch.dtype, longest: int, pool_bytes: int, device: Device = "cpu") -> int:
    """Returns how many bytes the K/V of a drafter takes. For the arguments, see page_count."""
    each = bytes_per_page(spec, one_group(spec)[0], PAGE_SIZE, dtype, device)
    return page_count(spec, dtype, longest, pool_bytes, device) * each


def grow(pages: "array[int]", pool: PagePool, tokens: int) -> bool:
    """Adds pages until `tokens` tokens have slots. Returns False and changes nothing if the pool has too few pages."""
    more = pool.acquire(max(0, pool.pages_for(tokens) - len(pages)))
    pages.extend(more or ())
    return more is not None


# Runs the steps of a drafter's model, on a GPU as CUDA graphs.

CATCH_UP = 256  # the most tokens per step that a drafter's model computes to catch up, for example with a new prompt


class DraftRunner:
    """Computes the steps of a proposal. Sequences get the tokens that are sampled when the steps are read.

    ahead: whether a step is launched before the ids of the last one are read, so that a GPU computes all drafts without
    waiting for the host. graphs: whether steps are replayed as CUDA graphs.
    """

    def __init__(self, model: Model, cache: KVCache, *, ahead: bool, graphs: bool) -> None:
        self.runner = Runner(model, cache, graphs=graphs, max_batch_size=TILE, max_step_tokens=CATCH_UP)
        self.ahead = ahead
        self._launched: list[AnyStep] = []

    def launch(self, chunks: list[Chunk]) -> None:
        before = self._launched[-1] if self._launched else None
        self._launched.append(self.runner.launch(Plan(chunks), before))
        for chunk in chunks:
            chunk.sequence.pending_outputs += chunk.samples
        if not self.ahead:
            self.read()

    def read(self) -> None:
        """Waits for the steps, and adds the sampled tokens to their sequences."""
        launched, self._launched = self._launched, []
        for step in launched:
            for chunk, id in zip(step.plan.sampling, step.read().ids, strict=True):
                chunk.sequence.tokens.append(id)
                chunk.sequence.pending_outputs -= 1


class ModelDrafter(NeuralDrafter):
    """Runs a draft model. A sequence gets drafts only after the draft model has computed all its tokens.

    decoder: the decoder of the draft model. max_seq_len: the served model's. Sequences that are too long for the draft
    model get no drafts. pool_bytes: the maximum memory for K/V, but always enough for one sequence. Sequences for which
    there is no room get no drafts. ahead, graphs: see DraftRunner
    """

    name = "the draft model"

    def __init__(
        self, decoder: Decoder, max_seq_len: int, pool_bytes: int, *, ahead: bool = False, graphs: bool = False
    ) -> None:
        spec, dtype, device = decoder.spec, decoder.weights.embed.dtype, decoder.weights.embed.device
        self.longest = min(max_seq_len, decoder.max_positions)
        pages = page_count(spec, dtype, self.longest, pool_bytes, device)
        slots = 1 + TILE * SLOTS_EACH if spec.recurrent else 0
        self._cache = KVCache(spec, [pages], PAGE_SIZE, dtype, device, state_slots=slots, state_dtype=dtype)
        self.steps = DraftRunner(fastest_decoder(decoder, self._cache), self._cache, ahead=ahead, graphs=graphs)
        self.sequences = DraftSequences(PagePool(pages, PAGE_SIZE), PagePool(slots, PAGE_SIZE) if slots else None)

    def forget(self, target: Sequence) -> None:
        """Frees the memory of a sequence that has ended."""
        self.sequences.forget(target)

    @torch.inference_mode()
    def _propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        held = [self._follow(target, count) for target, count in wanted]
        ready = self._catch_up([one for one in held if one is not None])
        counts = {one: count for one, (_, count) in zip(held, wanted, strict=True) if one is not None and one in ready}
        for drafted in range(1, max(counts.values(), default=0)):
            going = [one for one, count in counts.items() if count > drafted]
            self.steps.launch([Chunk(one.own, one.own.computed_tokens, 1, True) for one in going])
            for one in going:
                one.computed(one.own.computed_tokens + 1, known=False)
        self.steps.read()
        ends = [len(target.tokens) for target, _ in wanted]
        return [
            tuple(one.own.tokens[end:]) if one is not None and one in counts else ()
            for one, end in zip(held, ends, strict=True)
        ]

    def _follow(self, target: Sequence, count: int) -> DraftSequence | None:
        end = len(target.tokens) + count
        held = self.sequences.get(target, end) if end <= self.longest else None
        if held is not None:
            held.follow(target.tokens)
        return held

    def _catch_up(self, held: Iterable[DraftSequence]) -> set[DraftSequence]:
        """Computes the tokens that are new since the last drafts. Returns the sequences that now have a first draft.

        Sequences with few new tokens go first, so that a long prompt delays no other sequence.
        """
        budget, chunks, ready, behind = CATCH_UP, [], set(), {}
        for one in sorted(held, key=lambda one: one.left):
            length = min(one.left, budget)
            if length:
                chunks.append(Chunk(one.own, one.own.computed_tokens, length, length == one.left))
                behind[one] = one.own.computed_tokens + length
                ready |= {one} if length == one.left else set()
                budget -= length
        if chunks:
            self.steps.launch(chunks)
        for one, end in behind.items():
            one.computed(end, known=True)
        return ready


# Finds the draft model of --speculative-config, checks that it fits the served model, and limits its memory.

POOL_SHARE = 8  # a drafter's K/V takes at most 1 / POOL_SHARE of the served model's K/V budget, in addition to it


def draft_settings(model: ModelConfig, worker: WorkerConfig) -> tuple[ModelConfig, WorkerConfig]:
    """Returns the settings to load the draft model with. One process has it whole, also if several serve the model."""
    config = read_speculative_config(worker.speculative_config, worker.max_draft_tokens)
    alone = replace(worker, tensor_parallel_size=1, pipeline_parallel_size=1, rank_group="local")
    return (
        replace(model, model=config.model, mmproj="off", revision="", max_seq_len=0, task="generate"),
        replace(alone, kv_cache_gb=0.0, kv_cache_dtype="auto"),
    )


def draft_folder(worker: WorkerConfig) -> Path:
    """Returns the folder of the draft model's checkpoint; downloads it if necessary. Raises CheckpointError."""
    return resolve(read_speculative_config(worker.speculative_config, worker.max_draft_tokens).model)


@contextmanager
def explain_draft_model() -> Iterator[None]:
    """Makes every CheckpointError say that it is about the draft model."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the draft model ({FLAG}) cannot be used: {error}") from error


def check_fits(draft: ModelSpec, draft_folder: Path, served: ModelSpec, served_folder: Path) -> None:
    """Raises CheckpointError unless each token id stands for the same token in both models."""
    if draft.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"{draft_folder} has a vocabulary of {draft.vocab_size} tokens, and the served model one of "
            f"{served.vocab_size}"
        )
    if not same_vocabulary(draft_folder, served_folder):
        raise CheckpointError(f"{draft_folder} has other tokens than the served model under some ids")


def drafters_budget(worker: WorkerConfig) -> int:
    """Returns how many bytes the K/V of a drafter may take. worker: the settings of the served model."""
    return configured_budget(worker).nbytes // POOL_SHARE


# Compares the vocabularies of two checkpoints. Drafts are ids, so each id must stand for the same token in both.


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether the tokenizer.json files of two folders have the same tokens under the same ids. Merges may differ."""
    return _tokens(one) == _tokens(other)


def _tokens(folder: Path) -> dict[int, str]:
    told: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = told["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {id: token for token, id in vocabulary.items()}
    else:  # Unigram tokenizers have a list of (token, score) pairs
        tokens = {id: token for id, (token, _) in enumerate(vocabulary)}
    return tokens | {added["id"]: added["content"] for added in told.get("added_tokens", ())}
