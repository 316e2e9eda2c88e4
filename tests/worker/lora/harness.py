"""Loads adapters and runs greedy requests with them through the real scheduler and runner."""

from dataclasses import dataclass
from pathlib import Path

import torch

from shared.lora import read_files
from shared.messages import Adapter, Sampling
from tests.checkpoints import EOS
from tests.worker.scheduler.harness import commit
from worker.checkpoint.checkpoint import read_config
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.lora.loaded import LoadedAdapter, Product, load_adapter
from worker.lora.target_modules import sites_of
from worker.model_runner.runner import Runner
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.quantization.methods import in_memory
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import AdapterUse, PrefixState, Sequence

LONGEST = 256
CPU = torch.device("cpu")


def decoder_of(folder: Path, dtype: torch.dtype = torch.float32, quantization: str = "auto") -> Decoder:
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, quantization, CPU)
    return Decoder(spec, load(folder, spec, dtype, CPU, invariant=True, memory=memory), LONGEST)


def loaded(base: Path, decoder: Decoder, folder: Path, max_rank: int = 64) -> LoadedAdapter:
    sites = sites_of(base, decoder.spec, decoder.weights)
    return load_adapter(read_files(str(folder)), sites, decoder.weights.embed.dtype, CPU, max_rank)


def added(product: Product, x: torch.Tensor) -> torch.Tensor:
    """Returns what a low-rank product adds to the output of its linear for x [T, K]: [T, N] float32."""
    y = torch.zeros(len(x), len(product.factors))
    product.add(y, torch.arange(len(x)), x, 1.0)
    return y


def use(adapter: LoadedAdapter | None, scale: float = 1.0) -> AdapterUse | None:
    return None if adapter is None else AdapterUse(Adapter("a", "/a", adapter.sha256, scale), adapter)


@dataclass
class Asked:
    prompt: list[int]
    adapter: LoadedAdapter | None
    new: int = 12
    seed: int | None = None
    scale: float = 1.0
    repetition: float = 1.0  # the repetition penalty


def answers(
    decoder: Decoder, asked: list[Asked], *, chunk: int = 64, preempt_at: int = 0, prefix_cache: bool = True,
    drafts: int = 0, max_loras: int = 99, most_running: int = 64,
) -> list[list[int]]:  # fmt: skip
    """Returns the ids of each request, all in one scheduler.

    preempt_at: the step at which the newest sequence is preempted
    """
    groups = cache_groups(decoder.spec, LONGEST, paged=True)
    dtype = decoder.weights.embed.dtype
    pages, slots = 1 + 40 * LONGEST // 16, 1 + 3 * 40
    cache = KVCache(decoder.spec, [pages] * len(groups), 16, dtype, CPU, groups, slots, dtype)
    config = SchedulerConfig(
        max_seq_len=LONGEST, eos_token_ids=frozenset({EOS}), max_step_tokens=256, prefill_chunk_size=chunk,
        prefix_cache=prefix_cache, max_draft_tokens=drafts, max_loras=max_loras, max_batch_size=most_running,
    )  # fmt: skip
    pools = [PagePool(pages, 16, group.window) for group in groups]
    scheduler = Scheduler(config, pools, PagePool(slots, 16) if cache.states else None)
    runner = Runner(fastest_decoder(decoder, cache), cache)
    sequences = [_sequence(index, one) for index, one in enumerate(asked)]
    for sequence in sequences:
        scheduler.submit(sequence, 0.0)
    step = 0
    while scheduler.has_work:
        plan = scheduler.plan(float(step))
        used = {id(s.adapter.loaded) for chunk in plan.chunks if (s := chunk.sequence).adapter is not None}
        assert len(used) <= max_loras
        commit(scheduler, plan, runner.step(plan).ids, float(step))
        step += 1
        if step == preempt_at and scheduler.state.running:
            scheduler.state.preempt(next(reversed(scheduler.state.running)), float(step))
        assert step < 2000
    scheduler.check()
    return [sequence.tokens[sequence.prompt_len :] for sequence in sequences]


def _sequence(index: int, one: Asked) -> Sequence:
    drawn = one.seed is not None
    temperature = 0.8 if drawn else 0.0
    sampling = Sampling(
        one.new, temperature=temperature, seed=one.seed, ignore_eos=True, repetition_penalty=one.repetition
    )
    sequence = Sequence((b"f", index), list(one.prompt), len(one.prompt), sampling, one.seed or 0)
    sequence.adapter = use(one.adapter, one.scale)
    salt = "" if sequence.adapter is None else sequence.adapter.adapter.identity
    sequence.prefix = PrefixState(salt)
    return sequence
