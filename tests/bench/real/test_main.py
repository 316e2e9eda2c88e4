"""`python -m bench.real` measures a model end to end: the demo as a GGUF file, and the real model if it was fetched."""

import json
import re
from pathlib import Path

import pytest

import deploy.demo
from bench.peers import gguf_file
from bench.peers.llama_cpp import WEIGHTS
from bench.real.__main__ import PATTERNS, main
from bench.real.formats import FORMATS, GIVEN
from deploy.launcher.packaged_model import SMOLLM2, cached

DEMO = Path(deploy.demo.__file__).parent / "model"
STORY = "Once upon a time there was a little girl. She liked to play in the park with her friends.\n\n"


def measured(tmp_path: Path, model: Path, *more: str) -> list[dict[str, float | str]]:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text(STORY * 12)
    flags = ["--model", model, "--text", text, "--root", tmp_path / "root", "--json", figures, *more]
    assert main([*map(str, flags), "--sides", "sluice", "--window", "64"]) == 0
    rows: list[dict[str, float | str]] = json.loads(figures.read_text())
    return rows


def test_formats_of_a_file_are_compared_with_its_full_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.gguf"
    gguf_file.main(DEMO, file)
    awq = next(name for name in FORMATS if name.startswith("awq"))
    full, few = measured(tmp_path, file, "--formats", f"float32,{awq}", "--windows", "2")
    assert full["tokens"] == 128 and abs(float(full["kl"])) < 1e-4 and float(full["agreement"]) > 0.95
    assert float(full["kl"]) < float(few["kl"]) < 0.5
    assert f"| {awq} | Sluice, " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(cached(SMOLLM2) is None, reason="the real model was not fetched")
def test_a_real_file_is_close_to_its_full_model(tmp_path: Path) -> None:
    model = cached(SMOLLM2)
    assert model is not None
    [row] = measured(tmp_path, model, "--formats", "file", "--windows", "1")
    assert float(row["kl"]) < 0.01 and float(row["agreement"]) > 0.9


def test_patterns_find_the_figures_that_llama_perplexity_prints() -> None:
    printed = (
        "Mean PPL(Q)  :  26.976208 ±   1.633848\nMean PPL(base)  :  26.862458 ±   1.625002\n"
        "Mean    KLD:   0.002748 ±   0.000077\nSame top p: 97.098 ± 0.332 %\n"
    )
    found = {what: re.search(pattern, printed) for what, pattern in PATTERNS.items()}
    assert [match and match[1] for match in found.values()] == ["26.976208", "26.862458", "0.002748", "97.098"]


def test_an_impossible_count_of_windows_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.gguf"
    gguf_file.main(DEMO, file)
    flags = ["--model", str(file), "--root", str(tmp_path), "--sides", "sluice", "--windows", "9999"]
    (tmp_path / "text.txt").write_text(STORY)
    assert main([*flags, "--text", str(tmp_path / "text.txt")]) == 1
    assert "--windows asks for 9999" in capsys.readouterr().err


def test_every_format_of_llama_cpp_has_a_file_of_it() -> None:
    assert {form.theirs for form in FORMATS.values()} - {""} == {GIVEN, *WEIGHTS}
