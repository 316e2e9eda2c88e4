"""Tests of `sluice env`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import env_report
from tests.deploy.cli.harness import sluice
from tests.patience import PATIENCE_S
from worker.ops import native as library
from worker.ops import roofline
from worker.ops.native_build import TIERS, best_of


def test_env_lists_versions_and_machine_without_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_PORT", "99")
    monkeypatch.setenv("SLUICE_API_KEY", "secret")
    monkeypatch.setenv("SLUICE_STORE", "postgresql://u:secret@host/db")
    code, out, _ = sluice(capsys, "env")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["python"].strip().startswith(".".join(map(str, sys.version_info[:3])))
    assert lines["torch"].strip()[0].isdigit()
    assert {"cpu", "cpu kernels", "kernels", "gpu", "memory", "model cache", "triton cache"} <= lines.keys()
    assert "SLUICE_PORT=99" in out
    assert "secret" not in out
    _, out, _ = sluice(capsys, "env", "--json")
    assert json.loads(out).keys() == lines.keys()


def test_env_does_not_import_torch() -> None:
    check = "import sys; from deploy.cli.main import main; main(['env']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, timeout=PATIENCE_S).returncode == 0


def test_env_tells_the_instruction_set_and_its_cap(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_ISA", "avx2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    best = library.TIERS[best_of(found) if (found := library.library()) else 0]
    facts = json.loads(sluice(capsys, "env", "--json")[1])
    assert facts["kernels"].startswith("C with avx2" if best != "none" else "plain PyTorch")
    assert ("as SLUICE_ISA says" in facts["cpu kernels"]) == (best not in ("none", "avx2"))
    monkeypatch.setenv("SLUICE_ISA", "mmx")
    assert "SLUICE_ISA must be one of" in json.loads(sluice(capsys, "env", "--json")[1])["cpu kernels"]


def test_env_measures_only_if_asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measure", lambda threads: roofline.Floors(30.0, 200.0, None))
    assert "reading memory" not in json.loads(sluice(capsys, "env", "--json")[1])
    facts = json.loads(sluice(capsys, "env", "--json", "--measure")[1])
    assert facts["reading memory"].startswith("30.0 GB/s")
    assert facts["fp32 multiply-add"] == "200 GFLOP/s"
    assert facts["bf16 products"] == "not by this instruction set"


def test_env_builds_the_kernels_of_every_processor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built on one processor, and runs on others."""
    built: list[tuple[str, ...]] = []
    monkeypatch.setattr(env_report, "build", lambda sets, on_progress: built.append(sets))
    assert sluice(capsys, "env", "--build")[0] == 0 and built == [TIERS[1:]]
    assert "sluice env --build" in (Path(__file__).parents[3] / "deploy/docker/Dockerfile").read_text()


def test_env_says_that_only_a_library_of_another_processor_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_report, "existing", lambda sets: None)
    monkeypatch.setenv("CC", sys.executable)
    assert (
        json.loads(sluice(capsys, "env", "--json")[1])["cpu kernels"]
        == f"not built; a worker builds it with {sys.executable}"
    )
