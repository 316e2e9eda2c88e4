"""The runner on the CPU gives the same bits with and without overlap, whichever requests share a step."""

import pytest
import torch

from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests.checkpoints import Checkpoints
from tests.worker.model_runner.harness import OTHERS, PLAIN, RunnerBench, batch_invariant_decoder, scores, traffic
from worker.engine.build import load_engine
from worker.model_runner import runner
from worker.model_runner.runner import DeviceBroken
from worker.scheduler import host_budget
from worker.scheduler.sequence import Row


@pytest.mark.parametrize("samplings", [PLAIN * 2, PLAIN + OTHERS + PLAIN], ids=["plain", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_overlapping_steps_change_no_bit(family: str, samplings: list[m.Sampling], checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), torch.float32)
    plain, ahead = RunnerBench(decoder), RunnerBench(decoder, overlap=True)
    for bench in (plain, ahead):
        traffic(bench, samplings)
    assert (plain.max_in_flight, ahead.max_in_flight) == (0, 1)
    assert ahead.received()[0] == plain.received()[0] and len(ahead.received()[1]) == len(samplings)
    assert {id: end.outcome for id, end in ahead.received()[1].items()} == {
        id: end.outcome for id, end in plain.received()[1].items()
    }
    assert scores(ahead) == scores(plain)


def test_draws_in_parts_and_in_turns_change_no_bit(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, samplings = batch_invariant_decoder(checkpoints("llama"), torch.float32), PLAIN + OTHERS + PLAIN
    whole = RunnerBench(decoder)
    traffic(whole, samplings)
    monkeypatch.setattr(runner, "PART_LOGITS_CPU", 1)
    turns = RunnerBench(decoder, cpu_vocab_size=152_000)
    drawn = list[int]()

    def note(rows: list[Row], seconds: float) -> None:
        drawn.append(len(rows))
        runner_note(rows, host_budget.STEP_S)  # so each draw takes as long as a step may

    runner_note = runner.note_draws
    monkeypatch.setattr(runner, "note_draws", note)
    traffic(turns, samplings)
    assert set(drawn) == {1}
    assert turns.received()[0] == whole.received()[0] and scores(turns) == scores(whole)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [m.Sampling(6, temperature=0.0), m.Sampling(6, temperature=1.0, seed=3)])
def test_request_whose_logits_overflow_ends_in_an_error_and_no_other(
    value: float, sampling: m.Sampling, checkpoints: Checkpoints
) -> None:
    """It was answered with token 0 for ever, as a success."""
    decoder = batch_invariant_decoder.__wrapped__(checkpoints("llama"), torch.float32)
    whole, broken = RunnerBench(decoder), RunnerBench(decoder)
    prompts = {0: [20, 30, 40], 1: [20, 7, 40], 2: [9, 10]}
    whole.send(*(m.Submit(id, pack_u32(prompt), sampling) for id, prompt in prompts.items()))
    whole.iterate(12)
    decoder.weights.embed.stored[7] = value
    broken.runner.check_device()
    broken.send(*(m.Submit(id, pack_u32(prompt), sampling) for id, prompt in prompts.items()))
    broken.iterate(12)
    outputs, ends = broken.received()
    assert ends[1].outcome == m.Outcome.ERROR and "the logits are not finite" in ends[1].error and not outputs.get(1)
    assert {id: outputs[id] for id in (0, 2)} == {id: whole.received()[0][id] for id in (0, 2)}


def test_preemptions_of_in_flight_sequences_change_no_bit(checkpoints: Checkpoints) -> None:
    decoder = batch_invariant_decoder(checkpoints("qwen3"), torch.float32)
    roomy, tight = RunnerBench(decoder), RunnerBench(decoder, pages=14, overlap=True)
    for bench in (roomy, tight):
        traffic(bench, [m.Sampling(40, temperature=0.9, seed=i, ignore_eos=True) for i in range(8)])
    assert tight.scheduler.status.preemptions > 3 and roomy.scheduler.status.preemptions == 0
    assert tight.received()[0] == roomy.received()[0]


def test_check_device_uses_only_the_scratch_page_and_raises_if_broken(checkpoints: Checkpoints) -> None:
    folder = str(checkpoints("llama"))
    engine = load_engine(ModelConfig(model=folder), WorkerConfig(device="cpu", kv_cache_gb=0.01), lambda *_: None)
    cache, layers = engine.runner._cache, engine.runner.layers_started
    cache.k[0].fill_(7.0)
    before = (engine.pools[0].counts(), engine.scheduler.has_work, engine.scheduler.status.prefix_queries)
    engine.runner.check_device()
    assert (engine.pools[0].counts(), engine.scheduler.has_work, engine.scheduler.status.prefix_queries) == before
    changed = torch.unique((cache.k[0] != 7.0).nonzero()[:, 1])  # [layer, page, …]
    assert changed.tolist() == [0], "only the scratch page"
    assert engine.runner.layers_started - layers == len(engine.spec.layers), "a sign of life for each layer"
    engine.runner._model = None  # type: ignore[assignment]
    with pytest.raises(DeviceBroken, match="cpu cannot compute: AttributeError"):
        engine.runner.check_device()
