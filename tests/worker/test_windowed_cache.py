"""Models that return the pages behind a sliding window give the same results as with one group that keeps all pages."""

import pytest

from shared.config.settings import ModelConfig, Settings
from shared.config.worker import WorkerConfig
from shared.heartbeat import Heartbeat
from shared.messages import KVUsage, Sampling
from tests.checkpoints import WINDOW, Checkpoints
from tests.worker.models.harness import prompts_of
from tests.worker.scheduler.harness import commit
from worker.engine.build import Engine, load_engine
from worker.engine.status import StatusReporter
from worker.kv_cache.pages import chunk_pages, window_pages
from worker.scheduler.sequence import Sequence

PAGE, CHUNK = 16, 64


def engine(checkpoints: Checkpoints, kind: str, backend: str = "paged", gb: float = 0.02) -> Engine:
    worker = WorkerConfig(
        device="cpu", dtype="bfloat16", kv_cache_gb=gb, kv_cache_backend=backend, page_size=PAGE,
        prefill_chunk_size=CHUNK, max_batch_size=4, speculation="off",
    )  # fmt: skip
    return load_engine(ModelConfig(model=str(checkpoints(kind)), max_seq_len=1024), worker)


def usage(engine: Engine) -> dict[str, KVUsage]:
    reporter = StatusReporter(Settings(), 1, Heartbeat(), engine=engine)
    return {one.kind: one for one in reporter.status().kv_cache}


def serve(engine: Engine, lengths: list[int], new: int = 6) -> tuple[list[list[int]], list[dict[str, KVUsage]]]:
    """Returns the tokens of each sequence, and the owned pages after each step."""
    sampling = Sampling(new, temperature=0.0, ignore_eos=True)
    prompts = prompts_of(lengths, seed=1)
    sequences = [Sequence((b"", i), prompt, len(prompt), sampling, 0) for i, prompt in enumerate(prompts)]
    scheduler, owned = engine.scheduler, []
    for sequence in sequences:
        scheduler.submit(sequence, 0.0)
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        commit(scheduler, plan, engine.runner.step(plan).ids, 0.0)
        scheduler.check()
        owned.append(usage(engine))
    return [sequence.tokens for sequence in sequences], owned


@pytest.mark.parametrize("kind", ["gemma3", "qwen2", "mistral"])
def test_windowed_groups_change_no_token_and_keep_a_window(checkpoints: Checkpoints, kind: str) -> None:
    plain, windowed = engine(checkpoints, kind, "contiguous"), engine(checkpoints, kind)
    kinds = {"gemma3": {"full", "window"}, "qwen2": {"full", "window"}, "mistral": {"window"}}[kind]
    assert usage(windowed).keys() == kinds and usage(plain).keys() == {"full"}
    tokens, owned = serve(windowed, [900, 301, 40])
    assert tokens == serve(plain, [900, 301, 40])[0]
    most = window_pages(WINDOW, PAGE) + chunk_pages(CHUNK, PAGE)
    for one in owned:
        assert one["window"].owned <= 3 * most and ("full" not in one or one["full"].owned <= 57 + 20 + 3)
    assert max(one["window"].owned for one in owned) > most, "several sequences ran together"
    assert all(one.owned == one.bytes == 0 for one in owned[-1].values())
    assert serve(windowed, [900, 301, 40])[0] == tokens, "with cached prefixes"
    assert windowed.scheduler.status.prefix_hits > 800


def test_windowed_layers_of_a_long_sequence_keep_a_window(checkpoints: Checkpoints) -> None:
    """While a sequence decodes, layers with a window return pages; without a window, they would keep all pages."""
    model = engine(checkpoints, "gemma3")
    _, owned = serve(model, [900], new=20)
    decoding = owned[-2]
    full, window = decoding["full"], decoding["window"]
    assert full.owned == -(-919 // PAGE) and window.owned <= window_pages(WINDOW, PAGE)
    assert window.bytes == window.owned * model.size.page_bytes[1] < full.bytes, "two layers against one"


def test_more_sequences_fit_into_the_same_memory(checkpoints: Checkpoints) -> None:
    """Two sequences of 900 tokens run at once in memory that holds 1,500 tokens of all layers."""
    a_token = sum(engine(checkpoints, "gemma3").size.page_bytes) / PAGE
    small = engine(checkpoints, "gemma3", gb=1500 * a_token / (1 << 30))
    _, owned = serve(small, [900, 900])
    assert max(one["full"].owned for one in owned) >= 2 * 57 and small.scheduler.status.preemptions == 0
