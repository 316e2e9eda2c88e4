"""The real runner on the CPU, with and without steps that run ahead: the same bits, whoever shares a step."""

import random

import pytest
import torch

from shared import messages as m
from shared.codec import pack_u32
from tests.checkpoints import EOS, VOCAB, Checkpoints
from tests.worker.test_loop import Bench, FakeServer
from tests.worker.test_matrix import MAX_SEQ_LEN, decoder_of
from worker.engine.loop import Loop
from worker.engine.requests import RequestTable
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import Cache
from worker.model.cpu_decoder import fastest_decoder
from worker.model.decoder import Decoder
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.run.runner import Runner
from worker.schedule.policy import SchedulerConfig
from worker.schedule.scheduler import Scheduler


class Real(Bench):
    """A loop over a runner on the CPU, turned by hand."""

    def __init__(self, decoder: Decoder, pages: int = 100, **options: bool) -> None:
        self.now = 0.0
        dtype = decoder.weights.embed.dtype
        cache = Cache(decoder.spec, pages, 16, dtype, "cpu")
        self.runner = Runner(fastest_decoder(decoder, cache), cache, **options)  # type: ignore[assignment]
        config = SchedulerConfig(max_seq_len=MAX_SEQ_LEN, eos_token_ids=frozenset({EOS}), max_step_tokens=64)
        self.scheduler, self.link = Scheduler(config, PagePool(pages, 16)), FakeServer()
        self.stats, self.metrics = Stats(), Metrics()
        self.request_table = RequestTable(
            self.scheduler, self.stats, self.metrics, vocab_size=VOCAB, seeds=random.Random(0)
        )
        self.loop = Loop(
            self.scheduler, self.runner, self.request_table, self.link, self.stats, self.metrics, lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip
        self.most = 0  # steps under way after a turn

    def drain(self) -> None:
        for _ in range(600):
            self.turn()
            self.most = max(self.most, self.loop.in_flight)
            if not self.scheduler.has_work and not self.loop.in_flight:
                return
        raise AssertionError("it runs for ever")


PLAIN = [
    m.Sampling(20, temperature=0.0),
    m.Sampling(20, temperature=0.8, seed=3),
    m.Sampling(1, temperature=0.0),
    m.Sampling(25, temperature=1.2, top_k=9, seed=4),
    m.Sampling(25, temperature=3.0, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    m.Sampling(40, temperature=4.0, seed=7, stop_token_ids=tuple(range(0, VOCAB, 9))),
]
OTHERS = [
    m.Sampling(12, temperature=0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
    m.Sampling(8, temperature=2.0, seed=6, min_tokens=5, stop_token_ids=tuple(range(0, VOCAB, 3))),
    m.Sampling(9, temperature=0.7, seed=8, logprobs=2),
    m.Sampling(5, temperature=0.0, prompt_logprobs=True, logprobs=1),
    m.Sampling(9, temperature=1.0, seed=9, logit_bias=((7, 4.0),)),
]


def traffic(bench: Real, samplings: list[m.Sampling]) -> None:
    """Prompts of one token to several chunks, a new one each third turn."""
    draw = random.Random(1)
    for id, sampling in enumerate(samplings):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 5, 17, 64, 80]))]
        bench.say(m.Submit(id, pack_u32(prompt), sampling))
        bench.turn(3)
        bench.most = max(bench.most, bench.loop.in_flight)
    bench.drain()


def scores(bench: Real) -> dict[tuple[int, int, bool], tuple[bytes, bytes]]:
    return {
        (one.id, one.start, one.prompt): (one.chosen, one.top_ids)
        for _, step in bench.link.sent
        for one in step.logprobs
    }


@pytest.mark.parametrize("samplings", [PLAIN * 2, PLAIN + OTHERS + PLAIN], ids=["plain", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_that_run_ahead_change_no_bit(family: str, samplings: list[m.Sampling], checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints(family), torch.float32)
    plain, ahead = Real(decoder), Real(decoder, overlap=True)
    for bench in (plain, ahead):
        traffic(bench, samplings)
    assert (plain.most, ahead.most) == (0, 1)
    assert ahead.heard()[0] == plain.heard()[0] and len(ahead.heard()[1]) == len(samplings)
    assert {id: end.outcome for id, end in ahead.heard()[1].items()} == {
        id: end.outcome for id, end in plain.heard()[1].items()
    }
    assert scores(ahead) == scores(plain)


def test_nor_do_preemptions_under_way(checkpoints: Checkpoints) -> None:
    decoder = decoder_of(checkpoints("qwen3"), torch.float32)
    roomy, tight = Real(decoder), Real(decoder, pages=14, overlap=True)
    for bench in (roomy, tight):
        traffic(bench, [m.Sampling(40, temperature=0.9, seed=i, ignore_eos=True) for i in range(8)])
    assert tight.scheduler.status.preemptions > 3 and roomy.scheduler.status.preemptions == 0
    assert tight.heard()[0] == roomy.heard()[0]
