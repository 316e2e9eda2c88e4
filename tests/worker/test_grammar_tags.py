"""Added tokens in angle brackets that are not special are text to a grammar, as they are to who reads the answer."""

import json
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import byte_fallback_tokenizer, byte_level_tokenizer
from worker.grammar.compiler import GrammarCompiler, with_plain_tags

TEXT = json.dumps({"grammars": [{"lark_grammar": 'start: "<tool_call>" /[^<]*/'}]})


def tagged(tokenizer: PreTrainedTokenizerFast) -> str:
    """With a hole before the tag, a special token between and a plain word after."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "<tool_call>", "plain word")])
    return str(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("kind", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_tag_is_text_and_no_token_moves(kind: type[PreTrainedTokenizerFast], tmp_path: Path) -> None:
    tokenizer = kind()
    text = tagged(tokenizer)
    before, after = (LLTokenizer(one, eos_token=[2]) for one in (text, with_plain_tags(text)))
    ids = range(len(tokenizer))
    assert [before.decode_bytes([id]) for id in ids] == [after.decode_bytes([id]) for id in ids]
    tag, special = tokenizer.convert_tokens_to_ids(["<tool_call>", "<|python_tag|>"])
    (tmp_path / "tokenizer.json").write_text(text)
    compiler = GrammarCompiler(tmp_path, len(tokenizer), (2,))
    matcher = compiler.compile(TEXT).result().new_matcher()
    assert matcher.accept(tag) and not matcher.accept(tag)
    assert not compiler.compile(TEXT).result().new_matcher().accept(special)
    compiler.close()


def test_a_tokenizer_without_tags_is_left_alone() -> None:
    text = str(byte_level_tokenizer().backend_tokenizer.to_str())
    assert with_plain_tags(text) is text
