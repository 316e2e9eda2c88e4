"""The grammar compiler: its cache, its errors, and the vocabulary that it reads."""

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from frontend.structured_output import grammar as build
from shared import grammar_trial
from shared import messages as m
from shared.sandbox import Sandbox
from shared.wire import pack_u32
from tests.checkpoints import EOS, VOCAB, byte_fallback_tokenizer, byte_level_tokenizer
from tests.deep_grammars import ANCHORS, CHAINS, IDS, NAMED_DEFINITIONS, PERCENT, chain, rules
from tests.patience import PATIENCE_S
from tests.worker.structured_output.harness import NAMED, Bench, submit
from worker.structured_output import compiler
from worker.structured_output.compiler import MAX_CACHED, GrammarCompiler, InvalidGrammar, with_plain_tags

TEXT = json.dumps({"grammars": [{"lark_grammar": 'start: "<tool_call>" /[^<]*/'}]})


def test_compile_of_an_invalid_grammar_rejects_the_request(bench: Bench) -> None:
    wrong = {
        1: build.lark('start: <|nonesuch|> "b"', "x"),  # needs the vocabulary, which only the worker knows
        2: '{"grammars": [{"lark_grammar": "start: a\\na: a \\"x\\""}]}',
        3: "no grammar",
    }
    bench.send(*(submit(id, text) for id, text in wrong.items()), submit(4, NAMED, generated=pack_u32([7, 7])))
    bench.finish()
    assert {id: one.reason for id, one in bench.rejected().items()} == dict.fromkeys(range(1, 5), m.Refusal.INVALID)
    assert "nonesuch" in bench.rejected()[1].message and "so far" in bench.rejected()[4].message


def test_compile_caches_the_most_recently_used_grammars(bench: Bench) -> None:
    first = bench.compiler.compile(NAMED)
    for i in range(MAX_CACHED - 1):
        bench.compiler.compile(build.one_of([str(i)], "x"))
        assert bench.compiler.compile(NAMED) is first
    assert len(bench.compiler._cache) == MAX_CACHED
    for i in range(MAX_CACHED):
        bench.compiler.compile(build.one_of([str(-1 - i)], "x"))
    assert len(bench.compiler._cache) == MAX_CACHED and bench.compiler.compile(NAMED) is not first


def test_memory_of_large_grammars_is_returned_to_the_system(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, trims = [0], list[str]()
    monkeypatch.setattr(compiler, "rss_bytes", lambda: memory[0])
    monkeypatch.setattr(compiler, "return_memory", lambda: trims.append("now"))
    compiled = compiler._compile

    def compile_with(growth: int, text: str) -> None:
        def grow(*arguments: Any) -> Any:
            memory[0] += growth
            return compiled(*arguments)

        monkeypatch.setattr(compiler, "_compile", grow)
        future = bench.compiler.compile(text)
        with suppress(InvalidGrammar):
            future.result(PATIENCE_S)

    compile_with(1 << 20, build.one_of(["few"], "x"))
    compile_with(1 << 20, build.one_of(["some"], "x"))  # one tenant's compilations follow each other
    assert not trims
    compile_with(compiler.TRIMMED_BYTES, build.one_of(["many"], "x"))
    compile_with(compiler.TRIMMED_BYTES, build.lark('start: <|nonesuch|> "b"', "x"))
    compile_with(1 << 20, build.one_of(["a few"], "x"))
    assert len(trims) == 2


def test_compile_with_an_unreadable_tokenizer_raises(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler = GrammarCompiler(tmp_path, VOCAB, (EOS,))
    with pytest.raises(InvalidGrammar, match="tokenizer"):
        compiler.compile(NAMED).result(PATIENCE_S)
    compiler.close()


def tagged(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns a tokenizer with an unused id, then a special token, tags and a plain word."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    tokenizer.add_tokens(
        [AddedToken(tag, normalized=False) for tag in ("<think>", "<tool_call>", "<｜call｜>", "plain word")]
    )
    return str(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize("kind", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_with_plain_tags_makes_tags_text_moves_no_token(kind: type[PreTrainedTokenizerFast], tmp_path: Path) -> None:
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


def test_with_plain_tags_without_tags_changes_nothing() -> None:
    text = str(byte_level_tokenizer().backend_tokenizer.to_str())
    assert with_plain_tags(text) is text


@pytest.mark.parametrize(
    "part",
    [
        {"lark_grammar": rules("r", 2800)},
        {"lark_grammar": rules("r", 2800, '[capture="x"]')},
        {"lark_grammar": rules("T", 4500)},
        *({"json_schema": chain(kind, 1500)} for kind in (CHAINS, ANCHORS, IDS, PERCENT, NAMED_DEFINITIONS)),
    ],
    ids=["rules", "attributes", "terminals", "schema", "anchors", "ids", "percent", "named"],
)
def test_compile_of_a_deep_grammar_rejects_the_request_and_the_next_works(bench: Bench, part: dict[str, Any]) -> None:
    bench.send(submit(1, json.dumps({"grammars": [part]})), submit(2, NAMED))
    bench.finish()
    rejected = bench.rejected()
    assert list(rejected) == [1] and rejected[1].reason is m.Refusal.INVALID and "too deeply" in rejected[1].message
    assert list(bench.received()[1]) == [2]


def test_compile_in_a_child_that_takes_too_long_rejects_and_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(heavy: str) -> bool:
        """Whether a grammar takes too long. On a busy machine, the child may finish before this thread looks again."""
        try:
            return not bench.compiler.compile(heavy).result(PATIENCE_S)
        except InvalidGrammar as error:
            return "longer than 0.0 s" in str(error)

    grammars = [build.regex(f"((a{{100}}){{100}}){{{count}}}", "x") for count in (9, 10, 11, 12, 13)]
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "SECONDS", 1e-5)
        heavy = next(grammar for grammar in grammars if rejected(grammar))
    monkeypatch.setattr(grammar_trial, "SECONDS", PATIENCE_S)
    assert bench.compiler.compile(heavy).result(PATIENCE_S)


def test_compile_of_one_tenants_grammars_leaves_a_thread_to_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun = threading.Event(), list[str]()
    attempt = bench.compiler._try

    def slow(text: str, trial: Sandbox) -> None:
        begun.append(text)
        assert "slow" not in text or go_on.wait(PATIENCE_S)
        attempt(text, trial)

    monkeypatch.setattr(bench.compiler, "_try", slow)
    futures = [bench.compiler.compile(build.regex(f"slow {number}", "x"), "a") for number in range(3)]
    bench.compiler.compile(build.regex("quick", "x"), "b").result(PATIENCE_S)
    assert len(begun) == 2
    go_on.set()
    assert all(future.result(PATIENCE_S) for future in futures)
