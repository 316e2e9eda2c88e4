"""Answers that keep to a grammar, through the worker's real loop, desk, scheduler, sampler and a tiny random model."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema_rs import Draft202012Validator

from frontend.text import grammar_builder as build
from shared import messages as m
from shared.codec import pack_u32, unpack_u32
from shared.config import ModelConfig, WorkerConfig
from tests.checkpoints import EOS, VOCAB, Checkpoints
from tests.patience import PATIENCE_S
from tests.schemas import TEMPERATURES, WHOLE
from tests.worker.test_loop import ME, YOU, FakeServer
from tests.worker.test_loop import Bench as Heard
from worker.engine.load import Engine, load_engine
from worker.engine.loop import Loop
from worker.engine.requests import MAX_COMPILING, RequestTable
from worker.grammar.compiler import MAX_CACHED, Grammar, GrammarCompiler, InvalidGrammar
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.transport.server import FrontendGone

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"enum": [1, 2, 34]}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
NAMED = build.json_schema(PERSON, "x")
PROMPT = list(range(20, 40))


@cache
def engine_of(folder: Path) -> Engine:
    worker = WorkerConfig(device="cpu", dtype="float32", threads=1, kv_cache_gb=0.02, max_waiting_requests=300)
    return load_engine(ModelConfig(model=str(folder), max_seq_len=512), worker)


class Bench(Heard):
    """A loop over a real runner, turned by hand."""

    def __init__(self, engine: Engine) -> None:
        self.now, self.engine = 0.0, engine
        self.scheduler, self.link = engine.scheduler, FakeServer()
        stats, metrics = Stats(), Metrics()
        self.compiler = engine.compiler
        self.request_table = RequestTable(
            self.scheduler, stats, metrics, vocab_size=VOCAB, seeds=random.Random(0), compiler=self.compiler
        )
        self.loop = Loop(
            self.scheduler, engine.runner, self.request_table, self.link, stats, metrics, lambda: self.now,  # type: ignore[arg-type]
        )  # fmt: skip

    def compiled(self) -> None:
        """Waits until no grammar is being compiled, and has those that waited for one queued."""
        deadline = time.monotonic() + PATIENCE_S
        while any(not made.done() for made in self.compiler._cache.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def finish(self) -> None:
        self.turn()
        self.compiled()
        for _ in range(600):
            self.turn()
            if not self.scheduler.has_work:
                return
        raise AssertionError("it runs for ever")

    def text(self, tokens: list[int]) -> str:
        return self.compiler._vocabulary.result().decode_bytes([token for token in tokens if token != EOS]).decode()

    def rejected(self) -> dict[int, m.Rejected]:
        return {one.id: one for _, step in self.link.sent for one in step.rejected}


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Iterator[Bench]:
    bench = Bench(engine_of(checkpoints("llama")))
    yield bench
    assert not bench.scheduler.has_work


def submit(id: int, made: str, max_tokens: int = 200, **options: Any) -> m.Submit:
    told = {name: options.pop(name) for name in list(options) if name in m.Submit.__struct_fields__}
    sampling = m.Sampling(max_tokens, **{"seed": id, **options}, grammar=made)
    return m.Submit(id, pack_u32(PROMPT), sampling, **told)


# what comes out


@settings(max_examples=25, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WHOLE)
def test_what_ends_by_itself_keeps_to_its_schema(bench: Bench, whole: dict[str, Any]) -> None:
    made = build.json_schema(whole, "x")
    bench.link.sent.clear()
    first = max([id for _, id in bench.request_table._records], default=0) + 1
    bench.say(*(submit(first + i, made, 150, temperature=t) for i, t in enumerate(TEMPERATURES)))
    bench.finish()
    outputs, ends = bench.heard()
    assert not bench.rejected() and len(ends) == len(TEMPERATURES)
    for id, end in ends.items():
        assert end.outcome in (m.Outcome.EOS, m.Outcome.LENGTH), end
        if end.outcome is m.Outcome.EOS:
            Draft202012Validator(whole).validate(json.loads(bench.text(outputs[id])))


def alone(bench: Bench, *requests: m.Submit) -> tuple[dict[int, list[int]], dict[int, m.End]]:
    bench.link.sent.clear()
    bench.say(*requests)
    bench.finish()
    return bench.heard()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_kind_of_grammar_and_vocabulary(kind: str, checkpoints: Checkpoints) -> None:
    bench = Bench(engine_of(checkpoints(kind)))
    made = [build.one_of(["yes", "naïve 日本"], "x"), build.regex("[0-9]{3}-(a|ü)+z", "x"), build.json_object(),
            build.lark('start: "<" WORD ">" start | "."\nWORD: /[a-z]{2}/', "x"), NAMED]  # fmt: skip
    outputs, ends = alone(bench, *(submit(i, text, temperature=1.0) for i, text in enumerate(made)))
    texts = {id: bench.text(outputs[id]) for id in ends if ends[id].outcome is m.Outcome.EOS}
    assert {0, 1, 4} <= texts.keys()
    assert texts[0] in ("yes", "naïve 日本") and texts[1][3] == "-" and json.loads(texts[4]).keys() == {"name", "age"}


def test_a_matcher_moves_once_a_token_whatever_happens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in company, preempted, in steps that fail and are tried again, and resumed anywhere: the same answer."""
    ((wanted, end),) = zip(*(part.values() for part in alone(bench, submit(1, NAMED, temperature=0.9))), strict=True)
    assert end.outcome is m.Outcome.EOS
    others = [submit(i, build.json_object() if i % 2 else "", 40, temperature=1.0) for i in range(3, 9)]
    bench.link.sent.clear()
    bench.say(*others, submit(2, NAMED, temperature=0.9, seed=1))
    bench.turn()
    bench.compiled()
    failing = {8, 20}  # turns whose first try fails after its masks were made
    launch = bench.engine.runner.launch
    for turn in range(200):
        (target,) = [one for one in bench.scheduler.sequences() if one.key == (ME, 2)] or [None]
        if turn in (5, 17) and target in bench.scheduler.state.running:
            bench.scheduler.state.preempt(target, bench.now)

        def trouble(plan: Any, before: Any, turn: int = turn) -> Any:
            flight = launch(plan, before)
            if turn in failing:
                failing.remove(turn)
                raise MemoryError
            return flight

        monkeypatch.setattr(bench.engine.runner, "launch", trouble)
        bench.turn()
    assert not failing
    assert bench.heard()[0][2] == wanted and bench.heard()[1][2].outcome is m.Outcome.EOS
    monkeypatch.setattr(bench.engine.runner, "launch", launch)
    for have in range(0, len(wanted) + 1, 3):
        bench.link.sent.clear()
        bench.request_table._records.clear()
        bench.say(submit(1, NAMED, temperature=0.9, generated=pack_u32(wanted[:have])))
        bench.finish()
        rest = [token for _, step in bench.link.sent for token in unpack_u32(step.tokens)]
        assert wanted[:have] + rest == wanted, have


def test_ends_are_true(bench: Bench) -> None:
    some = build.regex("[a-z]+", "x")
    either = build.one_of(["a", "b"], "x")
    dead = build.lark('start: "a" B\nB: /[a-b]/ & /[c-d]/', "x")
    letter = token_of(bench, "a")
    banned = tuple((token, -100.0) for token in range(VOCAB) if token != 5)
    outputs, ends = alone(
        bench,
        submit(1, NAMED, 3),
        submit(2, some, 40, min_tokens=30, temperature=1.0),
        submit(3, either, 9, min_tokens=5, temperature=5.0),
        submit(4, either, ignore_eos=True),
        submit(5, build.regex("(ab)?", "x"), ignore_eos=True, temperature=3.0),
        submit(6, dead),
        submit(7, either, 9, logit_bias=banned, temperature=1.0),
        submit(8, "", 5, logit_bias=banned, ignore_eos=True),
        submit(9, either, 0),
        submit(10, build.regex("[a-c]{5}", "x"), stop_token_ids=(letter,), logit_bias=((letter, 50.0),)),
    )  # fmt: skip
    said = {id: end.outcome for id, end in ends.items()}
    assert said[1] is m.Outcome.LENGTH and len(outputs[1]) == 3
    assert len(outputs[2]) >= 30 and bench.text(outputs[2]).islower()
    assert said[3] is m.Outcome.EOS and bench.text(outputs[3]) in "ab", "it may not go on, so it ends before min_tokens"
    assert said[4] is said[5] is said[7] is m.Outcome.EOS and bench.text(outputs[7]) in "ab", "no bias revives"
    assert bench.text(outputs[5]) in ("", "ab")
    assert said[6] is m.Outcome.ERROR and "grammar" in ends[6].error and bench.text(outputs[6]) == "a"
    assert said[8] is m.Outcome.LENGTH and outputs[8] == [5] * 5, "neighbours are not masked"
    assert said[9] is m.Outcome.LENGTH and 9 not in outputs
    assert said[10] is m.Outcome.STOP and bench.text(outputs[10]) == "a"


def token_of(bench: Bench, text: str) -> int:
    (token,) = bench.compiler._vocabulary.result().tokenize_str(text)
    return token


def test_log_probabilities_are_those_of_the_model_itself(bench: Bench) -> None:
    alone(bench, submit(1, build.one_of(["a"], "x"), 9, logprobs=3))
    masked = [one for _, step in bench.link.sent for one in step.logprobs]
    alone(bench, submit(2, "", 1, logprobs=3))
    free = [one for _, step in bench.link.sent for one in step.logprobs]
    assert masked[0].top_ids == free[0].top_ids and masked[0].top_logprobs == free[0].top_logprobs


# what waits for its grammar


class Stuck(GrammarCompiler):
    """Compiles when the test says so."""

    def __init__(self) -> None:
        self.made: dict[str, Future[Grammar]] = {}

    def compile(self, text: str) -> "Future[Grammar]":
        return self.made.setdefault(text, Future())


@pytest.fixture
def stuck(bench: Bench) -> Stuck:
    bench.request_table._compiler = Stuck()
    return bench.request_table._compiler


def release(bench: Bench, stuck: Stuck, text: str = NAMED) -> None:
    stuck.made[text].set_result(bench.compiler.compile(text).result())
    for _ in range(300):
        bench.turn()


def test_a_request_is_answered_once_its_grammar_is_there(bench: Bench, stuck: Stuck) -> None:
    bench.say(submit(1, NAMED), submit(1, NAMED), submit(2, "", 3), m.Resync(1, 0))
    bench.turn(5)
    bench.say(submit(1, NAMED))
    bench.turn()
    assert bench.heard()[1].keys() == {2}, "others do not wait for it, and nothing is said of it"
    release(bench, stuck)
    assert bench.heard()[1][1].outcome is m.Outcome.EOS
    assert [one.id for _, step in bench.link.sent for one in step.admitted] == [2, 1]


def test_who_leaves_while_a_grammar_is_compiled_is_forgotten(bench: Bench, stuck: Stuck) -> None:
    bench.say(submit(1, NAMED), submit(2, NAMED, deadline_ms=3500))
    bench.say(submit(1, NAMED), submit(2, NAMED), who=YOU)
    bench.turn()
    bench.say(m.Abort((1, 1, 77)))
    bench.say(FrontendGone(), who=YOU)
    bench.turn(5)
    release(bench, stuck)
    assert {id: end.outcome for id, end in bench.heard()[1].items()} == {1: m.Outcome.ABORTED, 2: m.Outcome.DEADLINE}
    assert not bench.heard()[0] and not bench.heard(YOU)[0], "nothing was generated"


def test_draining_and_a_full_house_refuse(bench: Bench, stuck: Stuck) -> None:
    bench.say(*(submit(i, NAMED, 3) for i in range(MAX_COMPILING + 1)))
    bench.turn()
    assert bench.rejected()[MAX_COMPILING].reason is m.Refusal.QUEUE_FULL
    bench.request_table.draining = True
    release(bench, stuck)
    bench.say(submit(1000, NAMED))
    bench.turn()
    assert {one.reason for id, one in bench.rejected().items() if id != MAX_COMPILING} == {m.Refusal.DRAINING}
    assert len(bench.rejected()) == MAX_COMPILING + 2 and not bench.heard()[1]


def test_shutdown_refuses_who_waits(bench: Bench, stuck: Stuck) -> None:
    bench.say(submit(1, NAMED))
    bench.turn()
    bench.request_table.end_all(m.Outcome.SHUTDOWN, bench.now, "bye")
    bench.request_table.publish(bench.link, bench.now)  # type: ignore[arg-type]
    assert bench.rejected()[1].reason is m.Refusal.DRAINING


def test_what_the_vocabulary_cannot_say_is_refused(bench: Bench) -> None:
    wrong = {
        1: build.lark('start: <|nonesuch|> "b"', "x"),  # only the worker knows the vocabulary
        2: '{"grammars": [{"lark_grammar": "start: a\\na: a \\"x\\""}]}',
        3: "no grammar",
    }
    bench.say(*(submit(id, text) for id, text in wrong.items()), submit(4, NAMED, generated=pack_u32([7, 7])))
    bench.finish()
    assert {id: one.reason for id, one in bench.rejected().items()} == dict.fromkeys(range(1, 5), m.Refusal.INVALID)
    assert "nonesuch" in bench.rejected()[1].message and "so far" in bench.rejected()[4].message


def test_a_text_is_compiled_once_and_forgotten_when_it_is_old(bench: Bench) -> None:
    first = bench.compiler.compile(NAMED)
    for i in range(MAX_CACHED - 1):
        bench.compiler.compile(build.one_of([str(i)], "x"))
        assert bench.compiler.compile(NAMED) is first
    assert len(bench.compiler._cache) == MAX_CACHED
    for i in range(MAX_CACHED):
        bench.compiler.compile(build.one_of([str(-1 - i)], "x"))
    assert len(bench.compiler._cache) == MAX_CACHED and bench.compiler.compile(NAMED) is not first


def test_a_tokenizer_that_cannot_be_read_is_the_request_s_error(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, VOCAB, (EOS,))
    with pytest.raises(InvalidGrammar, match="tokenizer"):
        compiler.compile(NAMED).result(PATIENCE_S)
    compiler.close()
