"""The Python API over a worker played by hand: its forms, its order, its patience and its ends."""

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from frontend.errors import BadRequest, Overloaded, SluiceError, Unprocessable
from frontend.generation.service import Service
from frontend.offline.batch import BatchRunner
from frontend.offline.llm import LLM, CannotStart, Closed, ConfigError
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from shared.codec import unpack_u32
from tests.fakes import FakePool, Play, context
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def prompt_of(stream: Stream) -> list[int]:
    return [int(token) for token in unpack_u32(stream.submit.prompt)]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_now([text], False)[0]


def echoing(seconds: Callable[[list[int]], float] = lambda prompt: 0.001) -> Play:
    """A play: the prompt (less its `<s>`) comes back token by token, `seconds(prompt)` apart."""

    def play(link: FakePool, stream: Stream) -> None:
        said = [token for token in prompt_of(stream) if token < 264]
        pause = seconds(said)

        def step() -> None:
            done = len(stream.output)
            link.say(stream, said[done : done + 1])
            if done + 1 < len(said):
                link.later(step, pause)
            else:
                link.end(stream)

        link.later(step, pause)

    return play


@dataclass(eq=False)
class Narrow(FakePool):
    """Has room for a few at a time, and remembers how many there were at most."""

    room: int = 1000
    most: int = 0

    async def submit(self, prompt: list[int], sampling: m.Sampling, **more: Any) -> Stream:
        if self.live >= self.room:
            self.calls += 1
            raise Overloaded("full", code="queue_full", retry_after=60.0)
        stream = await super().submit(prompt, sampling, **more)
        self.most = max(self.most, self.live)
        return stream


@contextmanager
def over(link: FakePool, tokenizer: Tokenizer, **more: Any) -> Iterator[LLM]:
    @asynccontextmanager
    async def opening() -> AsyncIterator[BatchRunner]:
        loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        loaded.set_result(tokenizer)
        try:
            yield BatchRunner(Service(link, loaded), context(tokenizer, max_seq_len=160), **more)
        finally:
            await link.close()

    with LLM.over(opening) as llm:
        yield llm
    assert link.closed


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# forms


def test_a_prompt_gives_a_text_and_a_list_gives_a_list_in_its_order(tokenizer: Tokenizer) -> None:
    link = FakePool(play=echoing(lambda said: 0.01 / len(said)))  # the first is the last to end
    with over(link, tokenizer) as llm:
        assert llm.generate("hello") == "hello"
        assert llm.generate(["a", "bcd", "efghij"]) == ["a", "bcd", "efghij"]
        ids = ids_of(tokenizer, "hi")
        assert llm.generate(ids) == "hi"
        assert llm.generate([ids, "yo"]) == ["hi", "yo"]
        assert llm.generate([]) == []
        assert list(llm.generate([], stream=True)) == []
    assert [one.prompt for one in link.submitted[-2:]] == [ids, [264, *ids_of(tokenizer, "yo")]]  # a text gets its <s>


def test_streams_of_one_and_of_many(tokenizer: Tokenizer) -> None:
    with over(FakePool(play=echoing(lambda said: 0.005)), tokenizer) as llm:
        assert list(llm.generate("abc", stream=True)) == ["a", "b", "c"]
        pieces = list(llm.generate(["abc", "xy"], stream=True))
        assert ["".join(text for i, text in pieces if i == index) for index in (0, 1)] == ["abc", "xy"]
        assert [index for index, _ in pieces] != sorted(index for index, _ in pieces), "they come as they are made"


async def test_an_event_loop_of_the_callers_own(tokenizer: Tokenizer) -> None:
    with over(FakePool(play=echoing()), tokenizer) as llm:

        async def read(prompt: str) -> list[str]:
            return [text async for text in llm.generate_async(prompt)]

        assert await asyncio.gather(read("abc"), read("defg")) == [["a", "b", "c"], ["d", "e", "f", "g"]]
        awaited = await llm.generate_async("hi")
        assert [text async for text in awaited] == ["h", "i"]
        turn = {"role": "user", "content": "q"}
        assert "".join([text async for text in llm.chat_async([turn])]) == "<user>q\n<assistant>"


def test_a_chat_is_put_into_the_templates_words(tokenizer: Tokenizer) -> None:
    with over(FakePool(play=echoing()), tokenizer) as llm:
        first, second = [{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]
        assert llm.chat(first) == "<user>q\n<assistant>"
        assert llm.chat([first, second]) == ["<user>q\n<assistant>", "<system>s\n<assistant>"]
        assert "".join(llm.chat(first, stream=True)) == "<user>q\n<assistant>"
        asked = {"messages": first, "temperature": 0}
        assert llm.generate_with_request(asked) == "<user>q\n<assistant>"
        assert "".join(llm.generate_with_request(asked | {"stream": True})) == "<user>q\n<assistant>"
        [answer] = llm.complete_chat(first, temperature=0)
        assert (answer.text, answer.finish) == ("<user>q\n<assistant>", "eos")


def test_all_that_is_known_of_an_answer(tokenizer: Tokenizer) -> None:
    with over(FakePool(play=echoing()), tokenizer) as llm:
        [answer] = llm.complete("one. two", seed=5, stop=". ")
        assert (answer.text, answer.finish, answer.stop) == ("one", "stop", ". ")
        assert list(answer.ids) == ids_of(tokenizer, "one. ")
        assert (answer.seed, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9, 5)
        assert answer.logprobs is None
        assert [other.text for other in llm.complete(["a", "b"])] == ["a", "b"]


def test_options_reach_the_worker_as_the_http_apis(tokenizer: Tokenizer) -> None:
    link = FakePool(play=echoing())
    with over(link, tokenizer) as llm:
        llm.generate("a")
        llm.generate("a", max_tokens=7, top_k=3, temperature=None, stop_token_ids=(9,), logit_bias={4: 1.5}, seed=-1)
    plain, chosen = (one.sampling for one in link.submitted)
    assert plain == m.Sampling(max_tokens=128)
    assert (chosen.max_tokens, chosen.top_k, chosen.temperature) == (7, 3, 1.0)
    assert (chosen.stop_token_ids, chosen.logit_bias, chosen.seed) == ((9,), ((4, 1.5),), 2**64 - 1)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_progress_bar_for_who_asks(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], wanted: bool) -> None:
    pytest.importorskip("tqdm")
    with over(FakePool(play=echoing()), tokenizer) as llm:
        assert len(llm.generate(["a", "b", "c"], progress=wanted)) == 3
    assert ("3/3" in capsys.readouterr().err) is wanted


# patience


def test_a_full_queue_is_waited_for(tokenizer: Tokenizer) -> None:
    link = Narrow(play=echoing(), room=2)
    prompts = [f"p{i}" for i in range(12)]
    with over(link, tokenizer, concurrency=6) as llm:
        assert llm.generate(prompts) == prompts
    assert link.most <= 2 < link.calls - 12, "some were refused and came again"


def test_no_more_than_the_width_are_on_their_way(tokenizer: Tokenizer) -> None:
    link = Narrow(play=echoing())
    prompts = [f"p{i}" for i in range(20)]
    with over(link, tokenizer, concurrency=3) as llm:
        assert llm.generate(prompts) == prompts
    assert (link.most, link.calls) == (3, 20)


@pytest.mark.parametrize("code", ["worker_lost", "not_ready", "draining"])
def test_a_worker_that_is_away_is_waited_for_a_while(tokenizer: Tokenizer, code: str) -> None:
    away: dict[int, SluiceError] = {0: Overloaded("away", code=code)}
    with over(FakePool(play=echoing(), refusals=away), tokenizer) as llm:
        assert llm.generate("abc") == "abc"
    with (
        over(
            FakePool(play=echoing(), refusals={i: away[0] for i in range(9)}), tokenizer, recovery_timeout=0.05
        ) as llm,
        pytest.raises(Overloaded, match="away"),
    ):
        llm.generate("abc")


# ends


def test_one_failure_ends_all(tokenizer: Tokenizer) -> None:
    [bang] = ids_of(tokenizer, "!")

    def play(link: FakePool, stream: Stream) -> None:
        if prompt_of(stream)[-1] == bang:
            link.later(lambda: link.end(stream, m.Outcome.ERROR, "the step failed"), 0.02)

    link = FakePool(play=play)
    with over(link, tokenizer) as llm:
        with pytest.raises(SluiceError, match="the step failed"):
            llm.generate(["a", "b!", "c"])
        assert (link.live, len(link.aborted)) == (0, 2)


def test_a_stream_that_is_left_is_aborted(tokenizer: Tokenizer) -> None:
    link = FakePool(play=lambda link, stream: link.say(stream, ids_of(tokenizer, "h")))
    with over(link, tokenizer) as llm:
        for text in llm.generate("abc", stream=True):
            assert text == "h"
            break
        gc.collect()
        until(lambda: link.aborted == [1])


async def test_an_asynchronous_one_too(tokenizer: Tokenizer) -> None:
    link = FakePool(play=lambda link, stream: link.say(stream, ids_of(tokenizer, "h")))
    with over(link, tokenizer) as llm:
        stream = llm.generate_async("abc")
        assert await anext(stream) == "h"
        await stream.aclose()
        await asyncio.to_thread(until, lambda: link.aborted == [1])


def test_closing_ends_what_runs_and_refuses_what_comes(tokenizer: Tokenizer) -> None:
    link = FakePool(play=lambda link, stream: link.say(stream, ids_of(tokenizer, "h")))
    with over(link, tokenizer) as llm:
        stream = llm.generate("abc", stream=True)
        assert next(stream) == "h"
        llm.close()
        with pytest.raises(Closed):
            next(stream)
        with pytest.raises(Closed):
            llm.generate("abc")
        assert link.aborted == [1]


def test_without_a_with_it_ends_when_nobody_has_it(tokenizer: Tokenizer) -> None:
    closed: list[bool] = []

    @asynccontextmanager
    async def opening() -> AsyncIterator[BatchRunner]:
        loaded: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        loaded.set_result(tokenizer)
        yield BatchRunner(Service(FakePool(play=echoing()), loaded), context(tokenizer, max_seq_len=160))
        closed.append(True)

    assert LLM.over(opening).generate("abc") == "abc"
    gc.collect()
    assert closed == [True]


def test_what_kept_it_from_opening_is_raised() -> None:
    @asynccontextmanager
    async def opening() -> AsyncIterator[BatchRunner]:
        raise CannotStart("no such thing")
        yield

    with pytest.raises(CannotStart, match="no such thing"):
        LLM.over(opening)


# mistakes


def test_mistakes_are_the_http_apis(tokenizer: Tokenizer) -> None:
    link = FakePool(play=echoing())
    with over(link, tokenizer) as llm:
        with pytest.raises(BadRequest, match="empty"):
            llm.generate("")
        with pytest.raises(Unprocessable, match="top_p"):
            llm.generate("a", top_p=2.0)
        with pytest.raises(Unprocessable, match="more than this model"):
            llm.generate(["a", "b" * 70])
        with pytest.raises(TypeError, match="'n'"):
            llm.generate("a", n=2)  # type: ignore[call-overload]
        with pytest.raises(BadRequest, match="role"):
            llm.chat([{"content": "x"}])
    assert link.submitted == [], "a list is read whole before any of it runs"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"no_such": 1}, "there is no setting no_such"),
        ({"port": 80}, "there is no setting port"),
        ({"max_batch_size": "many"}, "max_batch_size must be a whole number"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"dtype": "float31"}, "dtype must be one of"),
        ({"batching_mode": "static", "use_chunked_prefill": True}, "--use-chunked-prefill needs"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("demo", **settings)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(CannotStart, match="there is no such folder"):
        LLM("/no/such/folder")


def test_the_calling_process_loads_no_torch() -> None:
    check = "import sys, frontend.offline.llm; print(sorted({'torch', 'transformers', 'worker'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
