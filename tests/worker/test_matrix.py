"""The same request gives the same bits: every legal mode, chunking, pool, cache and company, dense and with experts.

The same holds with right and wrong drafts. A run steps the real scheduler and runner, and keeps the logits of each
position that one request sampled from. These are compared bitwise with the logits of the request alone in the default
mode. test_gpu_matrix.py does the same on a GPU.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from frontend.output_parser.model_format import ToolFormat
from frontend.structured_output.grammar import json_schema, regex
from shared import messages as m
from shared.gguf.translated import translated
from tests.checkpoints import EOS, GEMMA4, HYBRID, VOCAB, Checkpoints
from tests.gguf_files import mixed, write
from tests.worker.matrix import (
    DRAFTING_MODES,
    DRAFTING_PAIRS,
    HALVES,
    KINDS,
    MODES,
    PAIRS,
    Kind,
    Mode,
    assert_same_answers,
    assert_same_bits,
    kind_of_tools,
    run,
)  # fmt: skip
from tests.worker.model_runner.harness import (
    batch_invariant_decoder,
)
from tests.worker.models.expert_checkpoints import in_mxfp4
from tests.worker.models.quantized_checkpoints import FORMATS, rewrite
from tests.worker.ops.harness.cpu_tiers import HERE, MOST, tier  # noqa: F401
from worker.kv_cache import pages as pages_module
from worker.models.decoder import Decoder
from worker.ops import native as c_library
from worker.ops.native_build import TIERS
from worker.quantization.methods import AS_STORED, InMemory
from worker.structured_output.compiler import GrammarCompiler

FAMILIES = (  # the last model of HYBRID has the same layers as the one before
    "llama", "qwen3", "gemma3", "qwen3-moe", "mixtral", "gpt-oss", "cohere2", "deepseek-v3", "ernie4_5-moe",
    "cohere2-moe", "afmoe", *GEMMA4, *HYBRID[:-1],
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
GGUF = ("GGUF Q4_K_M", "llama")  # Q6_K beside Q4_K in one stacked linear
MXFP4_EXPERTS = ("MXFP4 experts", "gpt-oss")
FEW_BITS_BELOW = (
    ("gptq v2, asymmetric, act-order", "llama"), ("awq", "qwen3"), GGUF, ("int4 a group, asymmetric", "qwen3-moe"),
    MXFP4_EXPERTS,
)  # fmt: skip
FEW_BITS = (
    *FEW_BITS_BELOW, ("int8 a row", "gemma3"), ("nf4", "phi3"), ("gptq, act-order", "qwen3-moe"), ("awq", "mixtral"),
)  # fmt: skip


# A few tests run with each lower instruction set; the full matrix runs with the best instruction set.
BELOW = [(which, torch.bfloat16) for which in HERE if which != TIERS[MOST]]
BELOW += [("avx2", torch.float32)] if TIERS.index("avx2") < MOST else []


@pytest.fixture(autouse=True)
def return_pages_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the block in which kernels read keys to one position, so that short sequences return pages, too."""
    monkeypatch.setattr(pages_module, "KEY_BLOCK", 1)


THOROUGH = ("llama", "gemma3", "qwen3_5")  # full attention, windows and recurrent states; tested in bf16 in every mode


def test_pairs_of_modes_are_complete() -> None:
    def pool(mode: Mode) -> tuple[int, bool]:
        return mode.page, mode.prefix

    def batching(mode: Mode) -> tuple[str, int]:
        return mode.batching, mode.chunk

    companies = {mode.company for mode in MODES}
    assert {(batching(mode), pool(mode)) for mode in PAIRS} == {(batching(mode), pool(mode)) for mode in MODES}
    for half, of in product(HALVES, (batching, pool)):
        assert {(of(mode), mode.company) for mode in half} == set(product(set(map(of, MODES)), companies))
    values = [(mode.page, mode.company, mode.drafts) for mode in DRAFTING_PAIRS]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert len({(value[left], value[right]) for value in values}) == 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_the_request_alone(
    family: str, dtype: torch.dtype, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert c_library.available(dtype), "the promise rests on the C kernels: is there a C compiler?"
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    thorough = family in THOROUGH and dtype is torch.bfloat16
    modes = MODES if thorough else HALVES[DTYPES.index(dtype)]
    assert_same_bits(decoder, [*modes, *(DRAFTING_MODES if thorough else DRAFTING_PAIRS)], monkeypatch)


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_depend_on_the_request_alone_on_every_tier(
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    modes = MODES[7::11] if family in THOROUGH else MODES[7::33]
    assert_same_bits(decoder, [*modes, *DRAFTING_PAIRS[::4]], monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3_5", "qwen3-moe"])
def test_bits_beside_a_head_that_reads_hidden_states_depend_on_the_request_alone(
    family: str, dtype: torch.dtype, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    layers = (1, 0, len(decoder.spec.layers) - 1)
    modes = [*HALVES[DTYPES.index(dtype)][::3], *DRAFTING_PAIRS]
    modes = [replace(mode, reads=layers if at % 2 else ()) for at, mode in enumerate(modes)]
    assert_same_bits(decoder, modes, monkeypatch)


def in_eight_bits(kept: str, modes: list[Mode]) -> list[Mode]:
    return [replace(mode, kept=kept) for mode in modes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kept", "family"), [("int8", "llama"), ("fp8", "qwen3"), ("int8", "gemma3"), ("fp8", "gemma4"), ("int4", "gemma3")]
)
def test_bits_of_an_eight_bit_cache_depend_on_the_request_alone(
    kept: str, family: str, dtype: torch.dtype, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    logits = assert_same_bits(
        decoder, in_eight_bits(kept, [*HALVES[DTYPES.index(dtype)], *DRAFTING_PAIRS]), monkeypatch
    )
    plain = run(decoder, Mode(), monkeypatch)[1]
    assert not torch.equal(logits[0], plain[0]), "eight bits change the logits"


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize(("kept", "family"), [("int8", "gemma3"), ("fp8", "llama")])
def test_bits_of_an_eight_bit_cache_depend_on_the_request_alone_on_every_tier(
    kept: str,
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = batch_invariant_decoder(checkpoints(family), dtype)
    assert_same_bits(decoder, in_eight_bits(kept, [*MODES[7::22], *DRAFTING_PAIRS[::4]]), monkeypatch)


def decoder_in_few_bits(
    name: str, folder: Path, dtype: torch.dtype, copy: Path, memory: InMemory = AS_STORED
) -> Decoder:
    if name == GGUF[0]:
        copy.mkdir()
        return batch_invariant_decoder(translated([write(GGUF[1], copy, mixed).file], copy), dtype, memory)
    shutil.copytree(folder, copy)
    stored = in_mxfp4(copy) if name == MXFP4_EXPERTS[0] else rewrite(copy, FORMATS[name])
    return batch_invariant_decoder(stored, dtype, memory)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "family"), FEW_BITS)
def test_bits_of_few_bits_depend_on_the_request_alone(
    name: str,
    family: str,
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_in_few_bits(name, checkpoints(family), dtype, tmp_path / "copy")
    modes = HALVES[0] if dtype is torch.bfloat16 else HALVES[1][::2]
    assert_same_bits(decoder, [*modes, *DRAFTING_PAIRS], monkeypatch)


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize(("name", "family"), FEW_BITS_BELOW)
def test_bits_of_few_bits_depend_on_the_request_alone_on_every_tier(
    name: str,
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_in_few_bits(name, checkpoints(family), dtype, tmp_path / "copy")
    assert_same_bits(decoder, [*MODES[7::22], *DRAFTING_PAIRS[::4]], monkeypatch)


INT8_INPUTS = InMemory(activations="int8")


@pytest.mark.parametrize(("name", "family"), [GGUF, FEW_BITS_BELOW[0], MXFP4_EXPERTS, ("int8 a row", "gemma3")])
def test_bits_of_activations_in_8_bits_depend_on_the_request_alone(
    name: str, family: str, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_float, of_int8 = (
        decoder_in_few_bits(name, checkpoints(family), torch.bfloat16, tmp_path / copy, memory)
        for copy, memory in (("float", AS_STORED), ("int8", INT8_INPUTS))
    )
    logits = assert_same_bits(of_int8, [*HALVES[0][::2], *DRAFTING_PAIRS[::2]], monkeypatch)
    plain = run(of_float, Mode(), monkeypatch)[1]
    assert not torch.equal(logits[0], plain[0]), "rounded inputs change the logits"
    assert float((logits[0] - plain[0]).norm() / plain[0].norm()) < 0.2


@pytest.mark.parametrize(("tier", "dtype"), BELOW, ids=str, indirect=["tier"])
@pytest.mark.parametrize(("name", "family"), [GGUF, MXFP4_EXPERTS])
def test_bits_of_activations_in_8_bits_depend_on_the_request_alone_on_every_tier(
    name: str,
    family: str,
    tier: str,  # noqa: F811
    dtype: torch.dtype,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_in_few_bits(name, checkpoints(family), dtype, tmp_path / "copy", INT8_INPUTS)
    assert_same_bits(decoder, [*MODES[7::33], *DRAFTING_PAIRS[::4]], monkeypatch)


def test_bits_of_a_grammar_depend_on_the_request_alone(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("llama")
    decoder = batch_invariant_decoder(folder, torch.float32)
    compiler = GrammarCompiler(folder, VOCAB, (EOS,))
    grammar = compiler.compile(json_schema({"type": "string", "minLength": 100}, "x")).result()
    logits = assert_same_bits(decoder, MODES[::5], monkeypatch, grammar)
    assert all(row.isneginf().any() for row in logits.values())
    compiler.close()


# Requests with penalties, samplers, token rules, grammars or log-probabilities: drafts change neither ids nor scores.


@pytest.fixture(scope="module")
def compiler(checkpoints: Checkpoints) -> Iterator[GrammarCompiler]:
    one = GrammarCompiler(checkpoints("llama"), VOCAB, (EOS,))
    yield one
    one.close()


@pytest.mark.parametrize(
    ("family", "modes"), [("llama", DRAFTING_PAIRS), ("qwen3_5", DRAFTING_PAIRS[2::4])], ids=["dense", "recurrent"]
)
@pytest.mark.parametrize("name", KINDS)
def test_answers_of_every_kind_are_the_same_with_drafts(
    name: str, family: str, modes: list[Mode], checkpoints: Checkpoints, compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kind = KINDS[name]
    grammar = compiler.compile(kind.grammar).result() if kind.grammar else None
    decoder = batch_invariant_decoder(checkpoints(family), torch.bfloat16)
    assert_same_answers(decoder, modes, monkeypatch, kind, grammar)


@pytest.mark.parametrize("tool_format", [one for one in ToolFormat if one is not ToolFormat.NONE])
def test_tool_calls_of_every_format_are_the_same_with_drafts(
    tool_format: ToolFormat, checkpoints: Checkpoints, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_of_tools(tool_format)
    decoder = batch_invariant_decoder(checkpoints("llama"), torch.float32)
    modes = [DRAFTING_MODES[2], DRAFTING_MODES[17]]
    assert {mode.company for mode in modes} == {"alone", "preempted"} and {mode.drafts for mode in modes} == {7}
    assert_same_answers(decoder, modes, monkeypatch, kind, compiler.compile(kind.grammar).result())


def test_dead_ends_are_the_same_with_drafts(
    checkpoints: Checkpoints, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts may lead to a place where the grammar and the bad words allow no token, which must end no answer."""
    folder = checkpoints("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bad = tuple((id,) for id in range(VOCAB) if "z" in tokenizer.decode([id]))
    kind = Kind({"bad_words": bad, "logprobs": 1}, regex("[a-f]{6}(z|[a-f]g?z)", "x"))
    decoder = batch_invariant_decoder(folder, torch.float32)
    modes = [mode for mode in DRAFTING_MODES if mode.drafts > 1]
    plain = assert_same_answers(decoder, modes, monkeypatch, kind, compiler.compile(kind.grammar).result())
    assert plain.outcome is m.Outcome.DEAD_END and plain.error
