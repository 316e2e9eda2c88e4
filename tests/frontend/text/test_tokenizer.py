"""Encoding outside the event loop, and the texts of single ids."""

import asyncio
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers

from frontend.errors import BadRequest
from frontend.text.tokenizer import HUGE_CHARS, INLINE_CHARS, Tokenizer
from tests.frontend.text import tokenizers as kinds
from tests.patience import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kinds.save(kinds.byte_level(), tmp_path, tokenizer_config={"eos_token": "</s>", "bos_token": "<s>"})


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


async def test_encode_adds_bos_only_with_add_special_tokens(tokenizer: Tokenizer) -> None:
    bos = next(token for token in tokenizer.special_ids if tokenizer.token_text(token) == "<s>")
    plain = await tokenizer.encode("the lo", add_special_tokens=False)
    assert await tokenizer.encode("the lo") == [bos, *plain]
    assert tokenizer.decode(plain) == "the lo"


@pytest.mark.parametrize("size", [10, INLINE_CHARS + 1])
async def test_encode_batch_equals_its_single_texts(size: int, tokenizer: Tokenizer) -> None:
    texts = ["the " * size, "", "é" * size]
    batch = await tokenizer.encode_batch(texts)
    assert batch == [tokenizer._engine.encode(text).ids for text in texts]
    tokenizer.close()


async def test_encode_of_long_texts_uses_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[threading.Thread] = []
    encode_now = tokenizer.encode_now

    def spy(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        where.append(threading.current_thread())
        return encode_now(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_now", spy)
    await asyncio.gather(tokenizer.encode("a"), tokenizer.encode("a" * (INLINE_CHARS + 1)))
    assert [thread is threading.main_thread() for thread in where] == [True, False]
    tokenizer.close()


async def test_encode_of_huge_texts_runs_one_at_a_time_beside_others(
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


async def test_encode_of_a_long_text_does_not_block_the_loop(tokenizer: Tokenizer) -> None:
    task = asyncio.create_task(tokenizer.encode("the é lo " * 20_000))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 20
    tokenizer.close()


@pytest.mark.parametrize(("most", "expected"), [(1, "a"), (2, "a"), (3, "añ"), (4, "añb"), (9, "añb")])
async def test_beginning_of_a_text_ends_between_characters(tokenizer: Tokenizer, most: int, expected: str) -> None:
    assert await tokenizer.beginnings(["añb", ""], most) == [expected, ""]
    with pytest.raises(BadRequest, match="not valid Unicode"):
        await tokenizer.beginnings(["\ud800"], most)


async def test_encode_of_a_lone_surrogate_is_a_bad_request(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        await tokenizer.encode("a\ud800")


def test_hash_is_of_the_tokenizer_file(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.hash == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert [tokenizer.token_text(token) for token in tokenizer.eos_ids] == ["</s>"]
    assert tokenizer.vocab_size == len(tokenizer._engine.get_vocab())


def test_token_bytes_of_byte_level_tokens(tokenizer: Tokenizer) -> None:
    by_text = {tokenizer._engine.id_to_token(token): token for token in range(tokenizer.vocab_size)}
    expected = {"Ġthe": b" the", "Ġâ": b" \xe2", "Ċ": b"\n", "</s>": b"", "tool call": b"tool call"}
    assert {text: tokenizer.token_bytes(by_text[text]) for text in expected} == expected
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_text(by_text["Ġâ"]) == " \ufffd"
    assert tokenizer.token_bytes(10**6) == b"" and tokenizer.token_text(10**6) == ""


def test_token_bytes_of_byte_fallback_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(kinds.save(kinds.byte_fallback(), tmp_path))
    by_text = {tokenizer._engine.id_to_token(token): token for token in range(tokenizer.vocab_size)}
    expected = {"<0xE2>": b"\xe2", "▁the": b" the", "<0x0A>": b"\n", "é": "é".encode(), "<s>": b""}
    assert {text: tokenizer.token_bytes(by_text[text]) for text in expected} == expected


def test_token_texts_of_unknown_ids_are_not_kept(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(list(range(tokenizer.vocab_size + 1000)))
    assert len(tokenizer._texts) == tokenizer.vocab_size - len(tokenizer.special_ids)


def test_vocab_size_of_a_vocabulary_with_holes_covers_its_last_ids(tmp_path: Path) -> None:
    engine = Engine(models.WordLevel({"a": 0, "b": 1000}, unk_token="a"))
    engine.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.load(kinds.save(engine, tmp_path))
    assert tokenizer.detokenizer().push([0, 1000, 500]) == ["a", "b", ""]
    assert tokenizer.decode([0, 1000, 500]) == "ab"


def test_import_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, frontend.text.chat_template; print({'torch', 'transformers'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize("scheme", ["prepended", "always", "never"])
async def test_text_that_follows_another_has_its_own_characters_only(scheme: str, tmp_path: Path) -> None:
    pieces = ["<unk>", "▁", "a", "b", "\n", "▁a", "ab", "▁ab"]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    engine = Engine(models.BPE(vocabulary, [("▁", "a"), ("a", "b"), ("▁", "ab")], unk_token="<unk>"))
    replaces = [normalizers.Replace(" ", "▁")]
    before = [normalizers.Prepend("▁")] if scheme == "prepended" else []
    engine.normalizer = normalizers.Sequence([*before, *replaces])
    if scheme == "always":
        engine.normalizer = normalizers.Sequence([])
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    strips = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), *strips])
    engine.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    texts = ["ab", " ab", "  a", "b\na", "\nb"]
    following = await tokenizer.encode_following(texts)
    lead = await tokenizer.encode("b", False)
    assert [tokenizer.decode([*lead, *ids]) for ids in following] == ["b" + text for text in texts]
    assert following[0] == [vocabulary["ab"]] and following[1] == [vocabulary["▁a"], vocabulary["b"]]
