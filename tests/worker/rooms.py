"""Serves requests with workers that lack a feature: `python -m tests.worker.rooms FOLDER` prints their answers.

A room is the set of modules of one feature. For each room, a process is forked in which these modules cannot be
imported. The process loads the checkpoint in FOLDER, and serves the requests below. The result is JSON: for each room,
the ids of the plain requests and, for each request with a feature, how it ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.patience import PATIENCE_S

ROOMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "drafts": (
        "worker.schedule.features.speculation", "worker.schedule.features.waiting_drafts",
        "worker.run.drafters.model_drafter", "worker.run.drafters.head_drafter", "worker.run.drafters.hidden_rows",
    ),
    "checks": ("worker.schedule.records.answer_check",),
    "scores": ("worker.schedule.records.prompt_scores", "worker.run.logprobs"),
    "pooling": ("worker.run.pooling",),
    "grammars": (
        "worker.grammar.compiler", "worker.grammar.matcher", "worker.grammar.token_rules", "worker.grammar.thinking",
        "worker.run.grammar_mask",
    ),
    "mirostat": ("worker.schedule.records.mirostat", "worker.run.samplers.mirostat"),
    "states": ("worker.schedule.features.states",),
    "adapters": (
        "worker.schedule.records.adapter_use", "worker.adapters.store", "worker.adapters.operations",
        "worker.adapters.experts",
    ),
    "pictures": (
        "worker.schedule.records.pictures", "worker.vision.vision", "worker.vision.step", "worker.vision.admission",
        "shared.pictures.digest",
    ),
}  # fmt: skip
ROOMS["all"] = tuple(name for names in ROOMS.values() for name in names)

PROMPT, LENGTH = list(range(20, 60)), 12
DIGITS = "%llguidance {}\nstart: /[0-9]+/"


def serve(folder: Path) -> dict[str, Any]:
    """Serves requests in a worker's loop. Returns the ids of plain requests, and how requests with features ended."""
    from shared import messages as m
    from shared.prefix_identity import PrefixIdentity
    from shared.wire.codec import pack_u32
    from tests.worker.engine.harness import Bench
    from worker.kv_cache.groups import cache_groups
    from worker.kv_cache.pages import PagePool
    from worker.kv_cache.tensors import KVCache
    from worker.model.checkpoint.checkpoint import read_config
    from worker.model.cpu_decoder import fastest_decoder
    from worker.model.decoder import Decoder
    from worker.model.families.families import spec_from_config
    from worker.model.weights import load
    from worker.run.runner import Runner
    from worker.schedule.policy import SchedulerConfig
    from worker.schedule.scheduler import Scheduler

    spec = spec_from_config(read_config(folder))
    decoder = Decoder(spec, load(folder, spec, torch.float32, torch.device("cpu"), invariant=True), 128)
    groups = cache_groups(spec, 128, paged=True)
    cache = KVCache(spec, [100] * len(groups), 16, torch.float32, "cpu", groups, 0, torch.float32)
    runner = Runner(fastest_decoder(decoder, cache), cache)
    config = SchedulerConfig(max_seq_len=128, max_step_tokens=64, prefill_chunk_size=16)
    compiler = _compiler(folder, spec)
    bench = Bench(
        runner=runner, config=config, pools=[PagePool(100, 16)], vocab_size=spec.vocab_size, compiler=compiler
    )

    def ask(id: int, sampling: m.Sampling, **options: Any) -> None:
        bench.send(m.Submit(id, pack_u32(PROMPT), sampling, **options))

    ask(1, m.Sampling(LENGTH, temperature=0.0, ignore_eos=True))
    ask(2, m.Sampling(LENGTH, temperature=0.9, top_k=50, seed=3, ignore_eos=True))
    bench.iterate(20)
    outputs, _ = bench.received()
    plain = [outputs[1], outputs[2]]
    adapter = m.Adapter("a", "/a", "0" * 64)
    features: dict[str, dict[int, dict[str, Any]]] = {
        "checks": {3: {"sampling": m.Sampling(60, temperature=0.0, ignore_eos=True), "answer": pack_u32(plain[0])}},
        "scores": {4: {"sampling": m.Sampling(1, prompt_logprobs=True)}, 5: {"sampling": m.Sampling(2, logprobs=1)}},
        "pooling": {6: {"sampling": m.Sampling(0), "pooling": m.Pooling(m.PoolingKind.MEAN)}},
        "grammars": {
            7: {"sampling": m.Sampling(3, allowed_token_ids=(5, 6, 7))},
            8: {"sampling": m.Sampling(3, grammar=DIGITS)},
        },
        "adapters": {
            9: {
                "sampling": m.Sampling(3),
                "adapter": adapter,
                "cache_salt": PrefixIdentity(adapter=adapter).text,
            },
        },
    }
    mirostat = m.SamplerChain((), mirostat=2)
    features["mirostat"] = {20: {"sampling": m.Sampling(3, chain=mirostat)}}
    for asked in features.values():
        for id, options in asked.items():
            ask(id, **options)
    deadline = time.monotonic() + PATIENCE_S
    while len(told := _told(bench)) < 2 + sum(map(len, features.values())) and time.monotonic() < deadline:
        bench.iterate()
    ends = {name: [told.get(id, "nothing") for id in asked] for name, asked in features.items()}
    pool, drafting = PagePool(9, 16), SchedulerConfig(max_seq_len=128, max_draft_tokens=4)
    ends["drafts"] = [_refusal(lambda: Scheduler(drafting, [pool]))]
    ends["states"] = [_refusal(lambda: Scheduler(config, [pool], PagePool(9, 16)))]
    return {"plain": plain, "ends": ends}


def _compiler(folder: Path, spec: Any) -> Any:
    try:
        from worker.grammar.compiler import GrammarCompiler
    except ImportError:
        return None
    return GrammarCompiler(folder, spec.vocab_size, spec.eos_ids)


def _told(bench: Any) -> dict[int, str]:
    """Returns the outcome of each request as the frontend learns it, or the message of its refusal."""
    told = {one.id: one.message for _, step in bench.server.sent for one in step.rejected}
    for id, end in bench.received()[1].items():
        told[id] = end.error or end.outcome.value
    return told


def _refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except ImportError as error:
        return str(error)
    return "made"


def in_a_process_without(modules: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Returns the result of serve() in a fork of this process that cannot import these modules."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        for name in modules:
            sys.modules[name] = None  # type: ignore[assignment]
        torch.set_num_threads(1)
        os.write(writing, json.dumps(serve(folder)).encode())  # fits into the pipe's buffer
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    served: dict[str, Any] = json.loads(answer) if answer else {}
    return served


if __name__ == "__main__":
    assert not [name for name in sys.modules if name.partition(".")[0] == "worker"]
    print(json.dumps({room: in_a_process_without(names, Path(sys.argv[1])) for room, names in ROOMS.items()}))
