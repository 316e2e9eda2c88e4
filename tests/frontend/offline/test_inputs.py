"""Options and prompts of the Python API are checked as in requests over HTTP."""

import pytest

from deploy.offline.inputs import as_chats
from frontend.errors import BadRequest, Unprocessable
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from tests.fakes import FakePool
from tests.frontend.offline.harness import echoing, llm_over


def test_options_reach_the_worker_as_over_http(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=echoing())
    with llm_over(pool, tokenizer) as llm:
        llm.generate("a")
        llm.generate("a", max_tokens=7, top_k=3, temperature=None, stop_token_ids=(9,), logit_bias={4: 1.5}, seed=-1)
    plain, chosen = (one.sampling for one in pool.submitted)
    assert plain == m.Sampling(max_tokens=128)
    assert (chosen.max_tokens, chosen.top_k, chosen.temperature) == (7, 3, 1.0)
    assert (chosen.stop_token_ids, chosen.logit_bias, chosen.seed) == ((9,), ((4, 1.5),), 2**64 - 1)


def test_adapter_is_chosen_by_name_for_texts_and_chats(tokenizer: Tokenizer) -> None:
    pool, one = FakePool(play=echoing()), m.Adapter("one", "/adapters/one", "5" * 64)
    with llm_over(pool, tokenizer, adapters={"one": one}) as llm:
        assert llm.generate(["a", "b"], adapter="one") == ["a", "b"]
        llm.chat("a", adapter="one")
        llm.generate_with_request({"messages": "a", "adapter": "one"})
        llm.generate("a", adapter=None)
        for name in ("two", ""):
            with pytest.raises(Unprocessable, match=f"`adapter`: there is no adapter '{name}'; there are 'one'"):
                llm.generate("a", adapter=name)
    assert [each.stream.submit.adapter for each in pool.submitted] == [one] * 4 + [None]


def test_text_in_a_chat_is_a_message_of_the_user(tokenizer: Tokenizer) -> None:
    message = [{"role": "user", "content": "hello"}]
    assert as_chats("hello") == as_chats(message) == ([message], True)
    assert as_chats(["hello", message]) == ([message, message], False)
    pool = FakePool(play=echoing())
    with llm_over(pool, tokenizer) as llm:
        assert llm.chat("hello") == llm.chat(message) == llm.chat(["hello"])[0]
    assert len({tuple(one.prompt) for one in pool.submitted}) == 1


def test_invalid_options_raise_the_http_apis_errors(tokenizer: Tokenizer) -> None:
    pool = FakePool(play=echoing())
    with llm_over(pool, tokenizer) as llm:
        with pytest.raises(BadRequest, match="empty"):
            llm.generate("")
        with pytest.raises(Unprocessable, match="top_p"):
            llm.generate("a", top_p=2.0)
        with pytest.raises(Unprocessable, match="maximum context length"):
            llm.generate(["a", "b" * 70])
        with pytest.raises(TypeError, match="'n'"):
            llm.generate("a", n=2)  # type: ignore[call-overload]
        with pytest.raises(BadRequest, match="role"):
            llm.chat([{"content": "x"}])
    assert pool.submitted == [], "a list is read whole before any of it runs"
