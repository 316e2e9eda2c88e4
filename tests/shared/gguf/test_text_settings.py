"""tokenizer_config.json and generation_config.json: named tokens, templates, ends and recommended sampling."""

from typing import Any

import pytest

from shared.gguf.container import Container
from shared.gguf.naming import GgufError
from shared.gguf.tokenizer import Vocabulary, generation_config_of, tokenizer_config_of

TEXTS = ["<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>", "<|end|>"]
PREFIX = "tokenizer.ggml."


def vocabulary(*more: str, **values: Any) -> Vocabulary:
    types = [3, 3, 1, 3, 1, 4, *[3] * len(more)]  # here, <|im_end|> is a normal token
    metadata = {PREFIX + "tokens": [*TEXTS, *more], PREFIX + "token_type": types, **values}
    return Vocabulary.read(Container("m.gguf", metadata, {}))


def ids(**named: int) -> dict[str, int]:
    return {f"{PREFIX}{name}_token_id": token for name, token in named.items()}


def test_every_named_end_ends_a_text() -> None:
    found = generation_config_of(vocabulary(**ids(bos=0, eos=1, eot=3, eom=2)))
    assert found == {"eos_token_id": [1, 3, 2, 5], "bos_token_id": 0}


def test_known_ends_of_turns_need_no_name() -> None:
    assert generation_config_of(vocabulary(**ids(eos=1)))["eos_token_id"] == [1, 3, 5]


def test_turns_of_harmony_end_after_their_last_message() -> None:
    found = generation_config_of(vocabulary("<|return|>", "<|call|>", **ids(eos=6, eot=5)))
    assert sorted(found["eos_token_id"]) == [3, 6, 7]
    assert 5 in generation_config_of(vocabulary("<|return|>", **ids(eos=6)))["eos_token_id"]


@pytest.mark.parametrize("name", ["padding", "unknown", "bos", "eot"])
def test_id_of_minus_one_is_no_token(name: str, caplog: pytest.LogCaptureFixture) -> None:
    without, given = vocabulary(**ids(eos=1)), vocabulary(**ids(eos=1, **{name: (1 << 32) - 1}))
    assert generation_config_of(given) == generation_config_of(without)
    assert tokenizer_config_of(given) == tokenizer_config_of(without)
    assert f"m.gguf: tokenizer.ggml.{name}_token_id is 4294967295" in caplog.text


def test_other_id_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(GgufError, match="padding_token_id is 4294967294, but there are 6 tokens"):
        tokenizer_config_of(vocabulary(**ids(eos=1, padding=(1 << 32) - 2)))


def test_no_end_at_all_is_refused() -> None:
    plain = Vocabulary.read(Container("m.gguf", {PREFIX + "tokens": ["a", "b"]}, {}))
    with pytest.raises(GgufError, match=r"m.gguf has no tokenizer.ggml.eos_token_id"):
        generation_config_of(plain)


def test_end_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(GgufError, match=r"eot_token_id is 6, but there are 6 tokens"):
        generation_config_of(vocabulary(**ids(eos=1, eot=6)))


def test_recommended_sampling() -> None:
    values = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    found = generation_config_of(vocabulary(**ids(eos=1), **values))
    assert {name: found[name] for name in ("do_sample", "temperature", "top_k", "top_p")} == {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95
    }  # fmt: skip


def test_recommended_sampling_that_files_leave_out() -> None:
    found = generation_config_of(vocabulary(**ids(eos=1), **{"general.basename": "SmolLM2"}))
    assert (found["do_sample"], found["temperature"], found["top_p"]) == (True, 0.2, 0.9)
    own = {"general.basename": "smollm2", "general.sampling.temp": 0.6}
    assert generation_config_of(vocabulary(**ids(eos=1), **own))["temperature"] == 0.6
    assert "do_sample" not in generation_config_of(vocabulary(**ids(eos=1), **{"general.basename": "other"}))


def test_named_tokens_and_one_template() -> None:
    found = tokenizer_config_of(vocabulary(**ids(bos=0, eos=1), **{"tokenizer.chat_template": "{{ x }}"}))
    assert (found["bos_token"], found["eos_token"], found["chat_template"]) == ("<s>", "</s>", "{{ x }}")
    assert "unk_token" not in found


def test_named_templates() -> None:
    values = {
        "tokenizer.chat_template": "d",
        "tokenizer.chat_template.tool_use": "t",
        "tokenizer.chat_templates": ["x"],
    }
    found = tokenizer_config_of(vocabulary(**values))
    assert found["chat_template"] == [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert "chat_template" not in tokenizer_config_of(vocabulary())
