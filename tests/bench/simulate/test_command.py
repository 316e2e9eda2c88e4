"""The `sluice simulate` command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.client.workloads import WORKLOADS
from bench.simulate import calibrate, command
from bench.simulate.cost import CostModel, Observation, load
from deploy.cli import main
from shared.config.settings import Settings
from tests.patience import PATIENCE_S


def simulate(*words: str) -> int:
    return main.main(["simulate", *words])


def test_simulate_all_workloads_prints_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--workload", "all", "--length-scale", "0.1", "--rate-scale", "4") == 0
    out = capsys.readouterr().out
    for name, workload in WORKLOADS.items():
        assert f"| {name} | " in out and f"\n{name}: " in out, workload.text
    assert out.count("pages owned") == len(WORKLOADS)


def test_simulate_takes_the_worker_s_flags_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = "--workload synthetic --rate 50 --duration 2 --prompt-tokens 5-30 --output-tokens 4"
    words += f" --max-batch-size 3 --page-size 4 --pages 100 --cost cpu-qwen3-0.6b --json {out}"
    assert simulate(*words.split()) == 0
    content = json.loads(out.read_text())
    replayed = content["workloads"]["synthetic"]
    assert content["about"]["worker"]["max_batch_size"] == max(replayed["timeline"]["running"]) == 3
    assert replayed["timeline"]["free"][0] <= 100
    assert {len(request["stamps"]) for request in replayed["requests"]} == {4}
    assert replayed["summary"]["requests"] == len(replayed["requests"]) > 50
    assert f"| synthetic | {len(replayed['requests'])} | 0 |" in capsys.readouterr().out


def test_simulate_faster_traffic_has_a_longer_queue(tmp_path: Path) -> None:
    waiting = []
    for times in ("1", "64"):
        out = tmp_path / f"{times}.json"
        words = f"--workload continuous_batching --length-scale 0.2 --max-batch-size 4 --speedup-of-traffic {times}"
        assert simulate(*words.split(), "--json", str(out)) == 0
        waiting.append(max(json.loads(out.read_text())["workloads"]["continuous_batching"]["timeline"]["waiting"]))
    assert waiting[0] == 0 and waiting[1] > 10


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--pages 0", "--pages: must be a whole number above 0, not '0'"),
        ("--rate x", "--rate: must be a number above 0, not 'x'"),
        ("--prompt-tokens 9-3", "--prompt-tokens: must be LOW-HIGH"),
        ("--workload nobody", "--workload: 'nobody' is not one of all, baseline,"),
        ("--cost nothing", "--cost nothing is neither a file nor one of"),
        ("--pages 9 --kv-cache-backend contiguous", "--pages 9: the K/V pool does not hold one sequence"),
        ("--state-slots 1", "--pages 8192, --state-slots 1: a sequence needs"),
        ("--batching-mode static --use-chunked-prefill", "--use-chunked-prefill needs"),
        ("--page-sise 3", "did you mean --page-size?"),
        ("--port 3", "unknown flag --port"),
    ],
)
def test_simulate_mistake_is_one_sentence_and_exits_2(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*words.split()) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("sluice simulate: ") and error in stderr and stderr.count("\n") == 1


def test_plot_without_matplotlib_is_refused_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert simulate("--plot", str(tmp_path / "plot.png")) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (
        "", f"sluice simulate: --plot needs matplotlib; run: {sys.executable} -m pip install matplotlib\n"
    )  # fmt: skip


def test_calibrate_missing_model_exits_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--calibrate", "/no/such/folder") == 3
    assert "/no/such/folder" in capsys.readouterr().err


def test_calibrate_writes_a_cost_that_simulate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = CostModel(0.02, 1e-3, 1e-6, 1e-4)
    counts = [(1, 9, 1), (8, 800, 8), (32, 99, 32), (64, 64, 1), (128, 5000, 1)]

    def measure(settings: Settings, say: object) -> list[Observation]:
        assert settings.model.model.endswith("deploy/demo/model") and settings.worker.threads == 1
        return [Observation(*count, true.seconds(*count)) for count in counts]

    monkeypatch.setattr(calibrate, "measure", measure)
    out = tmp_path / "cost.json"
    assert simulate("--calibrate", "demo", "--threads", "1", "--out", str(out)) == 0
    assert load(str(out)).token == pytest.approx(true.token)
    assert simulate("--workload", "baseline", "--length-scale", "0.05", "--cost", str(out)) == 0
    assert "| baseline | 10 | 0 |" in capsys.readouterr().out


def test_simulate_imports_no_heavy_libraries() -> None:
    check = (
        "import sys; from deploy.cli.main import main\n"
        "assert main(['simulate', '--workload', 'baseline', '--length-scale', '0.02']) == 0\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'transformers', 'zmq'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
