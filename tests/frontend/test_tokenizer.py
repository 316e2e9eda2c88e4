"""Loading checkpoints, encoding off the loop, what single ids stand for; broken folders say what is wrong."""

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from frontend.errors import BadRequest
from frontend.text.tokenizer import HUGE_CHARS, INLINE_CHARS, Tokenizer, TokenizerError
from shared.config import ConfigError
from tests.frontend import tokenizers_for_tests as kinds
from tests.patience import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kinds.save(kinds.byte_level(), tmp_path, tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"})


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


async def test_encode_adds_bos_only_when_asked(tokenizer: Tokenizer) -> None:
    bos = next(token for token in tokenizer.special_ids if tokenizer.token_text(token) == "<s>")
    plain = await tokenizer.encode("the lo", add_special_tokens=False)
    assert await tokenizer.encode("the lo") == [bos, *plain]
    assert tokenizer.decode(plain) == "the lo"


@pytest.mark.parametrize("size", [10, INLINE_CHARS + 1])
async def test_a_batch_is_its_texts(size: int, tokenizer: Tokenizer) -> None:
    texts = ["the " * size, "", "é" * size]
    batch = await tokenizer.encode_batch(texts)
    assert batch == [tokenizer._engine.encode(text).ids for text in texts]
    tokenizer.close()


async def test_long_texts_leave_the_loop_and_short_ones_do_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[threading.Thread] = []
    encode_now = tokenizer.encode_now

    def spy(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        where.append(threading.current_thread())
        return encode_now(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_now", spy)
    await asyncio.gather(tokenizer.encode("a"), tokenizer.encode("a" * (INLINE_CHARS + 1)))
    assert [thread is threading.main_thread() for thread in where] == [True, False]
    tokenizer.close()


async def test_huge_texts_are_encoded_one_at_a_time_and_others_do_not_wait_for_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()
    under_way: list[int] = []
    encode_now = tokenizer.encode_now

    def slow(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if len(texts[0]) > HUGE_CHARS:
            under_way.append(len(texts[0]))
            assert going_on.wait(PATIENCE_S)
        return encode_now(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_now", slow)
    huge = [asyncio.create_task(tokenizer.encode("a " * HUGE_CHARS)) for _ in range(3)]
    await asyncio.wait_for(tokenizer.encode("a" * HUGE_CHARS), PATIENCE_S)
    assert len(under_way) == 1
    going_on.set()
    one, *others = await asyncio.gather(*huge)
    assert all(other == one for other in others) and len(under_way) == 3
    tokenizer.close()


async def test_the_loop_turns_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    task = asyncio.create_task(tokenizer.encode("the é lo " * 20_000))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 20
    tokenizer.close()


async def test_lone_surrogates_are_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        await tokenizer.encode("a\ud800")


def test_identity(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.hash == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert [tokenizer.token_text(token) for token in tokenizer.eos_ids] == ["</s>"]
    assert tokenizer.vocab_size == len(tokenizer._engine.get_vocab())


def test_bytes_of_byte_level_tokens(tokenizer: Tokenizer) -> None:
    by_text = {tokenizer._engine.id_to_token(token): token for token in range(tokenizer.vocab_size)}
    expected = {"Ġthe": b" the", "Ġâ": b" \xe2", "Ċ": b"\n", "</s>": b"", "tool call": b"tool call"}
    assert {text: tokenizer.token_bytes(by_text[text]) for text in expected} == expected
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_text(by_text["Ġâ"]) == " \ufffd"
    assert tokenizer.token_bytes(10**6) == b"" and tokenizer.token_text(10**6) == ""


def test_bytes_of_byte_fallback_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kinds.save(kinds.byte_fallback(), tmp_path))
    by_text = {tokenizer._engine.id_to_token(token): token for token in range(tokenizer.vocab_size)}
    expected = {"<0xE2>": b"\xe2", "▁the": b" the", "<0x0A>": b"\n", "é": "é".encode(), "<s>": b""}
    assert {text: tokenizer.token_bytes(by_text[text]) for text in expected} == expected


def test_ids_outside_the_vocabulary_are_not_remembered(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(list(range(tokenizer.vocab_size + 1000)))
    assert len(tokenizer._texts) == tokenizer.vocab_size - len(tokenizer.special_ids)


def test_a_vocabulary_with_holes_keeps_its_last_ids(tmp_path: Path) -> None:
    engine = Engine(models.WordLevel({"a": 0, "b": 1000}, unk_token="a"))
    engine.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.load(kinds.save(engine, tmp_path))
    assert tokenizer.detokenizer().push([0, 1000, 500]) == ["a", "b", ""]
    assert tokenizer.decode([0, 1000, 500]) == "ab"


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


def test_eos_of_a_nested_text_config(tmp_path: Path) -> None:
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


def test_templates_from_config_and_files(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]}
    kinds.save(kinds.byte_level(), tmp_path, tokenizer_config=config)
    assert Tokenizer.load(tmp_path).templates == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert Tokenizer.load(tmp_path).templates == {"default": "new", "tool_use": "tools", "rag": "rag"}


def test_a_template_given_by_hand_is_the_only_one(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]}
    folder = kinds.save(kinds.byte_level(), tmp_path / "model", tokenizer_config=config)
    (tmp_path / "mine.jinja").write_text("mine")
    assert Tokenizer.load(folder, str(tmp_path / "mine.jinja")).templates == {"default": "mine"}
    with pytest.raises(ConfigError, match=r"--chat-template .*yours\.jinja: there is no such file"):
        Tokenizer.load(folder, str(tmp_path / "yours.jinja"))
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read: .*Is a directory"):
        Tokenizer.load(folder, str(tmp_path))


def test_template_as_plain_text(tmp_path: Path) -> None:
    kinds.save(kinds.byte_level(), tmp_path, chat_template={"chat_template": "mine"})
    assert Tokenizer.load(tmp_path).templates == {"default": "mine"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("generation_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", json.dumps({"chat_template": 3}), "chat_template must be"),
        ("tokenizer_config.json", json.dumps({"chat_template": [{}]}), "needs a name"),
    ],
)
def test_broken_folders_say_what_is_wrong(folder: Path, name: str, content: str | None, message: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.load(folder)


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, frontend.text.chat_template; print({'torch', 'transformers'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
