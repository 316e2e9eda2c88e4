"""The Python API over a fake worker pool: forms of calls, settings, order of outputs."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.offline.llm import LLM, CannotStart
from frontend.text.tokenizer import Tokenizer
from shared.config.declaration import ConfigError
from tests.fakes import FakePool
from tests.frontend.offline.harness import echoing, ids_of, llm_over
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


def test_generate_of_a_prompt_is_a_text_and_of_a_list_a_list_in_order(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=echoing(lambda said: 0.01 / len(said)))  # the first prompt is the shortest and ends last
    with llm_over(pool, tokenizer) as llm:
        assert llm.generate("hello") == "hello"
        assert llm.generate(["a", "bcd", "efghij"]) == ["a", "bcd", "efghij"]
        ids = ids_of(tokenizer, "hi")
        assert llm.generate(ids) == "hi"
        assert llm.generate([ids, "yo"]) == ["hi", "yo"]
        assert llm.generate([]) == []
        assert list(llm.generate([], stream=True)) == []
    # a text gets <s> in front, ids do not
    assert [one.prompt for one in pool.submitted[-2:]] == [ids, [264, *ids_of(tokenizer, "yo")]]


def test_generate_stream_of_one_and_of_many_prompts(tokenizer: Tokenizer) -> None:
    with llm_over(FakePool(play=echoing(lambda said: 0.005)), tokenizer) as llm:
        assert list(llm.generate("abc", stream=True)) == ["a", "b", "c"]
        pieces = list(llm.generate(["abc", "xy"], stream=True))
        assert ["".join(text for i, text in pieces if i == index) for index in (0, 1)] == ["abc", "xy"]
        assert [index for index, _ in pieces] != sorted(index for index, _ in pieces), "they come as they are made"


async def test_generate_async_runs_in_the_callers_event_loop(tokenizer: Tokenizer) -> None:
    with llm_over(FakePool(play=echoing()), tokenizer) as llm:

        async def read(prompt: str) -> list[str]:
            return [text async for text in llm.generate_async(prompt)]

        assert await asyncio.gather(read("abc"), read("defg")) == [["a", "b", "c"], ["d", "e", "f", "g"]]
        awaited = await llm.generate_async("hi")
        assert [text async for text in awaited] == ["h", "i"]
        turn = {"role": "user", "content": "q"}
        assert "".join([text async for text in llm.chat_async([turn])]) == "<user>q\n<assistant>"


def test_chat_uses_the_chat_template(tokenizer: Tokenizer) -> None:
    with llm_over(FakePool(play=echoing()), tokenizer) as llm:
        first, second = [{"role": "user", "content": "q"}], [{"role": "system", "content": "s"}]
        assert llm.chat(first) == "<user>q\n<assistant>"
        assert llm.chat([first, second]) == ["<user>q\n<assistant>", "<system>s\n<assistant>"]
        assert "".join(llm.chat(first, stream=True)) == "<user>q\n<assistant>"
        asked = {"messages": first, "temperature": 0}
        assert llm.generate_with_request(asked) == "<user>q\n<assistant>"
        assert "".join(llm.generate_with_request(asked | {"stream": True})) == "<user>q\n<assistant>"
        [answer] = llm.complete_chat(first, temperature=0)
        assert (answer.text, answer.finish) == ("<user>q\n<assistant>", "eos")


def test_complete_returns_ids_usage_seed_and_stop(tokenizer: Tokenizer) -> None:
    with llm_over(FakePool(play=echoing()), tokenizer) as llm:
        [answer] = llm.complete("one. two", seed=5, stop=". ")
        assert (answer.text, answer.finish, answer.stop) == ("one", "stop", ". ")
        assert list(answer.ids) == ids_of(tokenizer, "one. ")
        assert (answer.seed, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9, 5)
        assert answer.logprobs is None
        assert [other.text for other in llm.complete(["a", "b"])] == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"no_such": 1}, "there is no setting no_such"),
        ({"port": 80}, "there is no setting port"),
        ({"max_batch_size": "many"}, "max_batch_size must be a whole number"),
        ({"lora_modules": "one=/no/such/adapter"}, "--lora-modules: .*/no/such/adapter"),
        ({"lora_modules": "one"}, "--lora-modules takes NAME=PATH"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"dtype": "float31"}, "dtype must be one of"),
        ({"batching_mode": "static", "use_chunked_prefill": True}, "--use-chunked-prefill needs"),
    ],
)
def test_invalid_settings_raise_before_a_worker_starts(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("demo", **settings)


def test_missing_folder_raises_cannot_start() -> None:
    with pytest.raises(CannotStart, match="there is no such file or folder"):
        LLM("/no/such/folder")


def test_import_loads_no_torch() -> None:
    check = "import sys, deploy.offline.llm; print(sorted({'torch', 'transformers', 'worker'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
