"""`sluice bench gpu` runs as a whole, on the CPU with tiny sizes, and its checks find wrong kernels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import sections
from bench.gpu.checks.cases import CASES
from bench.gpu.checks.correctness import kernel
from bench.gpu.checks.random_inputs import Case
from bench.gpu.clock import HostClock
from bench.gpu.environment import Environment, spec_of
from bench.gpu.measure import tile_sweep
from bench.gpu.measure.ranks import rates
from bench.gpu.measure.transformers_peer import OLDER
from bench.gpu.setup.checkpoint import tokenizer
from bench.gpu.setup.profiler import Span, extent, gaps
from bench.gpu.setup.roofline import head_parameters, kv_bytes, linear_parameters, prefill_operations
from bench.gpu.shapes import CONFIGS, DEFAULT_MODELS, SMALL
from bench.gpu.tables import Table
from deploy.cli import main
from worker.ops.linear.triton_tiles import CANDIDATES, Tile, measured_entry, measured_tile


def bench(*words: str) -> int:
    return main.main(["bench", "gpu", *words])


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(torch.device("cpu"), torch.bfloat16, SMALL, HostClock(), ("tiny",), tmp_path, 1, 1e12)


@pytest.mark.slow
def test_gpu_command_runs_all_sections_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("json", "out", "trace", "tiles", "log")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    code = bench("--device", "cpu", "--models", "tiny", "--seed", "1", *flags)
    printed = capsys.readouterr().out
    assert code == 0, printed + files["log"].read_text()
    tables: dict[str, Any] = json.loads(files["json"].read_text())["sections"]
    assert list(tables) == [section.name for section in sections.SECTIONS]
    titles = [printed.index(section.title) for section in sections.SECTIONS]
    assert titles == sorted(titles) and "### Correctness" in printed[: titles[1]]
    assert files["out"].read_text().count("\n### ") == len(tables)
    assert all(row.get("result", "pass") == "pass" for row in tables["correct"]["rows"])
    _figures(tables, "decode", "ms a step", len(SMALL.batches) + 8)
    _figures(tables, "decode", "% of floor", len(SMALL.batches) + 8)
    _figures(tables, "prefill", "% of GEMM rate", 2)
    _figures(tables, "attention", "%", 5)
    _figures(tables, "ablations", "gain %", 4)
    _figures(tables, "linear", "µs invariant", 9)
    assert {row["row 0 alone"] for row in tables["linear"]["rows"]} <= {"yes", "no"}
    _figures(tables, "linear", "same bits", 9 + 3 * 6)
    _figures(tables, "sweep", "gain %", 2 * 5)
    measured = json.loads(files["tiles"].read_text())["cpu"]
    assert [entry[0] for entries in measured.values() for entry in entries] == [*SMALL.sweep] * 5
    _figures(tables, "experts", "%", 2 * 5 * len(SMALL.rows))
    _figures(tables, "start", "first token s", 2)
    _figures(tables, "served", "tokens/s", 2)
    # not empty with an older transformers, such as 5.0
    older = [row for row in tables["peer"]["rows"] if row.get("note") == OLDER]
    _figures(tables, "peer", "tokens/s", 0 if older else 2)
    assert all(row.get("failed", 0) == 0 for name in ("served", "peer") for row in tables[name]["rows"])
    assert [row["note"] for row in tables["idle"]["rows"] if "note" in row] == ["needs CUDA"]
    assert [row["note"] for row in tables["ranks"]["rows"]] == ["not measured: it needs at least 2 GPUs"]
    assert json.loads(files["trace"].read_text())["traceEvents"] and len(tables["trace"]["rows"]) > 3


def _figures(tables: dict[str, Any], name: str, column: str, count: int) -> None:
    found = [row[column] for row in tables[name]["rows"] if row.get(column) is not None]
    assert len(found) == count, (name, tables[name])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--models", "gpt-5"), "--models: 'gpt-5' is not one of llama-3.2-3b,"),
        (("--only", "decode,dreams"), "--only: 'dreams' is not one of all, correct,"),
        (("--out", "/nowhere/at/all"), "--out: /nowhere/at/all cannot be written"),
        (("--budget", "0"), "--budget: must be a number above 0"),
    ],
)
def test_gpu_command_invalid_flags_give_one_sentence(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 2
    assert said in capsys.readouterr().err


def test_ranks_are_measured_beside_one_process(env: Environment) -> None:
    """On a CPU, where one process is measured as one GPU is."""
    rows = [*rates(env, "tiny", [1, 2], ("decode 1", "prefill 32"))]
    assert [(row["GPUs"], row["what"]) for row in rows] == [
        (count, line) for count in (1, 2) for line in ("decode 1", "prefill 32")
    ]
    assert [row["of one GPU"] for row in rows[:2]] == [1.0, 1.0] and all(float(row["tokens/s"]) > 0 for row in rows)


def test_every_named_kernel_has_cases() -> None:
    assert set(sections.KERNELS) == set(CASES)


def test_correctness_of_a_wrong_kernel_fails(env: Environment) -> None:
    x = torch.randn(8, 8)
    assert _result(env, Case("same", lambda: (x * 1.001,), lambda: (x,))) == "pass"
    assert _result(env, Case("off", lambda: (x * 1.1,), lambda: (x,))) == "FAIL"
    assert _result(env, Case("shape", lambda: (x[:4],), lambda: (x,))) == "FAIL"
    assert _result(env, Case("raises", lambda: (x[9],), lambda: (x,))) == "FAIL"


def test_correctness_of_a_kernel_with_unwritten_output_fails(env: Environment) -> None:
    def half() -> tuple[torch.Tensor]:
        out = torch.empty(1000)
        out[:500] = 1
        return (out,)

    assert _result(env, Case("half", half, lambda: (torch.ones(1000),))) == "FAIL"


def test_correctness_of_ids_requires_equality(env: Environment) -> None:
    ids = torch.arange(9)
    assert kernel(env, "sample", [Case("same", lambda: (ids,), lambda: (ids,))])["result"] == "pass"
    assert kernel(env, "sample", [Case("one", lambda: (ids.clamp(max=7),), lambda: (ids,))])["result"] == "FAIL"


def _result(env: Environment, case: Case) -> str | float:
    return kernel(env, "some", [case])["result"]


def test_table_with_a_failed_check_is_not_well() -> None:
    table = Table(sections.SECTIONS[0])
    table.add({"what": "norm", "result": "pass"})
    assert table.well
    table.add({"what": "gate", "result": "FAIL"})
    assert not table.well


@pytest.mark.parametrize(
    "model", [*DEFAULT_MODELS, "llama-3.2-1b", "llama-3.1-8b", "tiny", "qwen3-30b-a3b", "gpt-oss-20b"]
)
def test_floors_count_the_parameters_that_transformers_counts(model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[model]))
        whole.tie_weights()  # transformers 5.0 does not tie weights on the meta device
    named = whole.named_parameters()  # has a tied head only once
    count = sum(part.numel() for name, part in named if part.dim() > 1 and "bias" not in name)
    spec = spec_of(model)
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    assert linear_parameters(spec) + head_parameters(spec) + table == count


def test_rows_read_the_experts_that_they_choose() -> None:
    spec = spec_of("qwen3-30b-a3b")
    one, all_of_them = linear_parameters(spec, 1), linear_parameters(spec)
    assert all_of_them - one == pytest.approx(48 * 120 * 3 * 2048 * 768)
    assert one < linear_parameters(spec, 2) < one + 48 * 8 * 3 * 2048 * 768
    assert linear_parameters(spec, 1000) == pytest.approx(all_of_them)
    assert linear_parameters(spec_of("tiny"), 1) == linear_parameters(spec_of("tiny"))


def test_roofline_windows_bound_the_kv_bytes() -> None:
    spec = spec_of("gemma-3-1b")
    windowed = sum(bool(layer.window) for layer in spec.layers)
    assert kv_bytes(spec, [1024]) == 2 * 2 * 256 * (512 * windowed + 1024 * (26 - windowed))
    full = 4 * spec.heads * spec.head_dim * (512 * 513 / 2) * 26
    assert prefill_operations(spec, 512) == 2 * linear_parameters(spec) * 512 + full + 2 * head_parameters(spec)


def test_profiler_gaps_are_times_without_a_span() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 2), Span("c", 12, 3), Span("d", 15, 1), Span("e", 20, 5)]
    assert gaps(spans) == [2, 4] and extent(spans) == 25
    assert gaps([]) == [] and extent([]) == 0


@pytest.mark.parametrize("size", [300, 2048, 128_256, 262_144])
def test_checkpoint_tokenizer_has_the_requested_vocabulary_size(size: int) -> None:
    made = tokenizer(size)
    assert made.get_vocab_size() == size
    assert made.decode([size - 1]) and made.decode(made.encode("so it goes").ids) == "so it goes"


def test_sweep_takes_the_fastest_tile_with_the_same_bits(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = tile_sweep.SweptWeight(env, 5120, 64, gated=None, wide=False)
    tried = [tile for tile in CANDIDATES["linear"] if tile.rows == 16]
    seconds = dict(zip(tried, (3.0, 1.0, 2.0), strict=True))
    wrong, right = tried[1], tried[2]
    monkeypatch.setattr(tile_sweep.tiles, "choose_tile", lambda *shape: tried[0])
    monkeypatch.setattr(tile_sweep, "candidates", lambda product, shape: tried)
    monkeypatch.setattr(swept, "_seconds", lambda x, tile: seconds[tile])
    monkeypatch.setattr(swept, "_launch", lambda x, weight, tile: torch.ones(1, 2) * (2 if tile is wrong else 1))
    best, figures = swept.sweep(1)
    assert best is right and figures["gain %"] == 50 and figures["result"] == "FAIL"
    assert figures["note"] == f"{tile_sweep.described(wrong)}: other bits"
    seconds[right] = 2.99
    assert swept.sweep(1)[0] is tried[0], "hardly faster"


def test_sweep_writes_what_the_worker_reads(tmp_path: Path) -> None:
    file, tile = tmp_path / "tiles.json", Tile(128, 64, 4, 4, "split")
    for device, name in (("A", "one"), ("A", "two"), ("B", "one")):
        tile_sweep.add_entries(file, device, name, [measured_entry(16, tile), measured_entry(64, tile)])
    table = json.loads(file.read_text())
    assert [[*products] for products in table.values()][-2:] == [["one", "two"], ["one"]]
    assert measured_tile(table, "A", "two", 17) == tile
