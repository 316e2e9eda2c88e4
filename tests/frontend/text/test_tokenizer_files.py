"""The text-related files of a checkpoint, and the errors for broken files."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from frontend.text.tokenizer import Tokenizer
from frontend.text.tokenizer_files import TokenizerError
from shared.config.declaration import ConfigError
from tests.frontend.text import tokenizers as kinds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kinds.save(kinds.byte_level(), tmp_path, tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"})


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    engine = kinds.byte_level()
    engine.enable_truncation(4)
    engine.enable_padding(length=32)
    tokenizer = Tokenizer.load(kinds.save(engine, tmp_path))
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_now(["the lo the lo", "a"])] == ["the lo the lo", "a"]


def test_eos_ids_prefer_generation_config_then_config(tmp_path: Path) -> None:
    engine = kinds.byte_level()
    ids = {text: engine.token_to_id(text) for text in kinds.SPECIALS}
    both = [ids["</s>"], ids["<|im_end|>"]]
    kinds.save(engine, tmp_path, config={"eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]})
    assert Tokenizer.load(tmp_path).eos_ids == (ids["</s>"],)
    assert Tokenizer.load(tmp_path).named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    kinds.save(engine, tmp_path, generation_config={"eos_token_id": both})
    assert Tokenizer.load(tmp_path).eos_ids == tuple(both)


def test_eos_ids_of_a_nested_text_config_are_found(tmp_path: Path) -> None:
    kinds.save(kinds.byte_level(), tmp_path, config={"text_config": {"eos_token_id": 7}})
    assert Tokenizer.load(tmp_path).eos_ids == (7,)


@pytest.mark.parametrize("source", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("token", ["Ġthe", "<think>"])
def test_named_tokens_are_as_special_as_in_transformers(source: str, token: str, tmp_path: Path) -> None:
    files = {source: {"eos_token": {"content": token}}}
    tokenizer = Tokenizer.load(kinds.save(kinds.byte_level(), tmp_path, **files))
    ids = tokenizer.encode_now([f"a{token}b"], add_special_tokens=False)[0]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=token)
    text = reference.decode(ids, skip_special_tokens=True)
    assert text == ("ab" if token == "Ġthe" else "a<think>b")
    assert tokenizer.decode(ids) == "".join(tokenizer.detokenizer().push(ids)) == text
    assert tokenizer.named_tokens["eos_token"] == token


def test_tokenizer_that_cannot_encode_is_refused_at_start(tmp_path: Path) -> None:
    """The library panics, which is no Exception."""
    engine = kinds.byte_level()
    engine.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    file = kinds.save(engine, tmp_path) / "tokenizer.json"
    stated = json.loads(file.read_text())
    stated["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(stated))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer: it cannot encode a text"):
        Tokenizer.load(tmp_path)


def test_text_config_that_is_no_object_is_left_to_the_worker_to_refuse(tmp_path: Path) -> None:
    kinds.save(kinds.byte_level(), tmp_path, config={"text_config": "x", "eos_token_id": 7})
    assert Tokenizer.load(tmp_path).eos_ids == (7,)


def test_tokenizer_of_another_model_is_refused_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = kinds.byte_level()
    count, all_ids = engine.get_vocab_size(with_added_tokens=False), engine.get_vocab_size()
    assert count < all_ids
    for config in ({"vocab_size": count - 1}, {"text_config": {"vocab_size": count - 1}, "vocab_size": all_ids}):
        kinds.save(engine, tmp_path, config=config)
        with pytest.raises(
            TokenizerError, match=f"has {count} tokens for text, but the model's vocab_size is {count - 1}"
        ):
            Tokenizer.load(tmp_path)
    kinds.save(engine, tmp_path, config={"vocab_size": all_ids})
    Tokenizer.load(tmp_path)
    assert not caplog.text


def test_added_tokens_beyond_the_vocabulary_are_served_until_a_text_needs_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = kinds.byte_level()
    size = engine.get_vocab_size()
    engine.add_special_tokens(["[PAD]"])
    kinds.save(engine, tmp_path, config={"vocab_size": size}, tokenizer_config={"chat_template": "[PAD]{{ messages }}"})
    assert Tokenizer.load(tmp_path).encode_now(["the"])[0]
    assert f"1 added tokens are outside the vocabulary ('[PAD]' ({size}))" in caplog.text
    assert "chats are refused where the chat template writes [PAD]" in caplog.text
    engine.post_processor = TemplateProcessing(single="[PAD] $A", special_tokens=[("[PAD]", size)])
    kinds.save(engine, tmp_path, config={"vocab_size": size})
    with pytest.raises(TokenizerError, match=rf"adds the token '\[PAD\]' to each text, whose id is {size}, but"):
        Tokenizer.load(tmp_path)


def test_templates_from_config_and_files(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]}
    kinds.save(kinds.byte_level(), tmp_path, tokenizer_config=config)
    assert Tokenizer.load(tmp_path).templates == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert Tokenizer.load(tmp_path).templates == {"default": "new", "tool_use": "tools", "rag": "rag"}


def test_template_of_the_flag_replaces_all_templates(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]}
    folder = kinds.save(kinds.byte_level(), tmp_path / "model", tokenizer_config=config)
    (tmp_path / "mine.jinja").write_text("mine")
    assert Tokenizer.load(folder, str(tmp_path / "mine.jinja")).templates == {"default": "mine"}
    with pytest.raises(ConfigError, match=r"--chat-template .*yours\.jinja: there is no such file"):
        Tokenizer.load(folder, str(tmp_path / "yours.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read: .*Is a directory"):
        Tokenizer.load(folder, str(tmp_path))


def test_template_as_plain_text_is_the_default(tmp_path: Path) -> None:
    kinds.save(kinds.byte_level(), tmp_path, chat_template={"chat_template": "mine"})
    assert Tokenizer.load(tmp_path).templates == {"default": "mine"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
        ("generation_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", json.dumps({"chat_template": 3}), r"tokenizer_config\.json: chat_template must be"),
        ("tokenizer_config.json", json.dumps({"chat_template": [{}]}), r"tokenizer_config\.json: each entry .* a name"),
    ],
)
def test_broken_folder_raises_with_the_reason(folder: Path, name: str, content: str | None, message: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(folder)
