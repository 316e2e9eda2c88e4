"""Many requests of the Python API at a time: concurrency, full queues, unavailable workers, failures."""

from pathlib import Path

import pytest

from frontend.errors import Overloaded, SluiceError
from frontend.output_parser import model_format
from frontend.output_parser.model_format import ModelFormat
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.api.scripted import CALLED
from tests.frontend.offline.harness import LimitedPool, echoing, ids_of, llm_over, prompt_of
from tests.frontend.speaking import tokenizer_with
from tests.templates import HARMONY


def test_run_all_waits_for_a_full_queue(tokenizer: Tokenizer) -> None:
    pool = LimitedPool(play=echoing(), room=2)
    prompts = [f"p{i}" for i in range(12)]
    with llm_over(pool, tokenizer, concurrency=6) as llm:
        assert llm.generate(prompts) == prompts
    assert pool.most <= 2 < pool.calls - 12, "some were refused and came again"


def test_run_all_keeps_to_its_concurrency(tokenizer: Tokenizer) -> None:
    pool = LimitedPool(play=echoing())
    prompts = [f"p{i}" for i in range(20)]
    with llm_over(pool, tokenizer, concurrency=3) as llm:
        assert llm.generate(prompts) == prompts
    assert (pool.most, pool.calls) == (3, 20)


@pytest.mark.parametrize("code", ["worker_lost", "not_ready", "draining"])
def test_run_all_waits_for_an_unavailable_worker_for_its_timeout(tokenizer: Tokenizer, code: str) -> None:
    away: dict[int, SluiceError] = {0: Overloaded("away", code=code)}
    with llm_over(FakePool(play=echoing(), refusals=away), tokenizer) as llm:
        assert llm.generate("abc") == "abc"
    with (
        llm_over(
            FakePool(play=echoing(), refusals={i: away[0] for i in range(9)}), tokenizer, recovery_timeout=0.05
        ) as llm,
        pytest.raises(Overloaded, match="away"),
    ):
        llm.generate("abc")


def test_run_all_with_one_failure_aborts_the_others(tokenizer: Tokenizer) -> None:
    [bang] = ids_of(tokenizer, "!")

    def play(pool: FakePool, stream: Stream) -> None:
        if prompt_of(stream)[-1] == bang:
            pool.later(lambda: pool.end(stream, m.Outcome.ERROR, "the step failed"), 0.02)

    pool = FakePool(play=play)
    with llm_over(pool, tokenizer) as llm:
        with pytest.raises(SluiceError, match="the step failed"):
            llm.generate(["a", "b!", "c"])
        assert (pool.live, len(pool.aborted)) == (0, 2)


def test_texts_of_harmony_have_the_marks_as_the_model_wrote_them(tmp_path: Path) -> None:
    """The fake worker's output is a tool call in gpt-oss's channels."""
    tokenizer = tokenizer_with(tmp_path, HARMONY, model_format.HARMONY)
    limits = m.Limits(max_seq_len=8192, vocab_size=tokenizer.vocab_size, eos_token_ids=(265,))
    pool = FakePool(sending(ids_of(tokenizer, CALLED)), welcome=m.Welcome(1, 1, 4711, MODEL, "", limits))
    style = ModelFormat.of(tokenizer.templates)
    with llm_over(pool, tokenizer, style=style, max_seq_len=2048) as llm:
        messages = [{"role": "user", "content": "Hi"}]
        assert llm.chat(messages) == CALLED == "".join(llm.chat(messages, stream=True))
        assert "<|" not in llm.generate("Hi", max_tokens=64)
