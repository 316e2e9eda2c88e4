"""Tests of `sluice run`: names, the verdict before a download, the download, and the way to an answer."""

import hashlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cli import run as command
from deploy.cli import verdict
from deploy.cli.machine_speed import Speed
from deploy.cli.run import NamedModel
from deploy.cli.verdict import Forecast, Offer, Verdict, best_format, ranked_formats
from deploy.launcher.child_command import CliError
from tests.checkpoints import save
from tests.deploy.cli.harness import feed_stdin, sluice
from tests.gguf_files import write
from tests.hub_server import Hub, serving
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine.forecast import forecast

GB = 10**9
SPEED = Speed(20.0, 100.0, None)
MIDDLE = Forecast(
    weights=4 * GB, read=4 * GB, kv=100_000, pool=GB, context=16_384, trained=16_384, layers=32
)  # of a model in Q4_K_M


def forecast_here(folder: Path, memory: int, *, tried: bool = False) -> Forecast:
    """Does what the process of `run_forecast` does, in this one."""
    try:
        return Forecast(**forecast(folder, memory))
    except CheckpointError as error:
        raise CliError(error, 3) from error


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a repository with one model in two formats."""
    files = {}
    for name in ("Q4_0", "Q8_0"):
        folder = tmp_path_factory.mktemp(name)
        files[f"Tiny-{name}.gguf"] = write("qwen3", folder, name).file.read_bytes()
    return files


@pytest.fixture
def hub(tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(command, "measured_speed", lambda: SPEED)
    monkeypatch.setattr(command, "available_bytes", lambda: 8 * GB)
    monkeypatch.setattr(verdict, "run_forecast", forecast_here)
    monkeypatch.setattr("shared.gguf.translated.BEGINNING", 100_000)
    with serving(tiny | {"README.md": b"#"}, tmp_path, monkeypatch) as hub:
        hub.stated = {name: hashlib.sha256(data).hexdigest() for name, data in tiny.items()}
        yield hub


def fetched(hub: Hub) -> list[str]:
    """Returns which files of weights were downloaded, without the beginnings that the verdict needs."""
    return [path.name for path in Path(str(hub.folder.parent / "cache")).rglob("*.gguf")]


def test_verdict_comes_before_the_download(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = sluice(capsys, "run", hub.name, "--dry-run")
    assert code == 0 and fetched(hub) == []
    lines = dict(line.strip().split(maxsplit=1) for line in told.splitlines())
    assert lines["org/tiny"] == "is org/tiny:Q8_0", "the best of the formats that fit"
    assert "to fetch" in lines["files"] and "fits" in lines["memory"] and "tokens/s" in lines["speed"]
    assert lines["formats"] == "also Q4_0: name one as org/tiny:FORMAT"
    assert sluice(capsys, "run", f"{hub.name}:q4_0", "--dry-run")[2].startswith("org/tiny:q4_0 is org/tiny:Q4_0\n")


def test_forecast_from_headers_is_that_of_the_whole_files(
    hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = command._judge(command.Settings()).hub(f"{hub.name}:Q8_0")
    (path,), _ = command.fetch_model(f"{hub.name}:Q8_0")
    assert judged.forecast == forecast_here(verdict.translated([path]), 8 * GB)
    assert judged.offer == Offer("org/tiny:Q8_0", len(tiny["Tiny-Q8_0.gguf"]), len(tiny["Tiny-Q8_0.gguf"]))
    assert command._judge(command.Settings()).hub(f"{hub.name}:Q8_0").offer.fetch == 0, "all of it is here now"


def test_safetensors_are_judged_by_their_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "run_forecast", forecast_here)
    folder = save("llama", tmp_path / "made", shard="100KB")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(files, tmp_path, monkeypatch) as hub:
        judged = verdict.Judge(lambda: SPEED, 8 * GB).hub(hub.name)
    assert judged.forecast == forecast_here(folder, 8 * GB)
    assert not any(name.endswith(".safetensors") and "@0" not in name for name in hub.downloads)
    assert judged.offer.fetch and judged.offer.model == "org/tiny"


def test_model_that_is_not_served_is_refused_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, memory: int, *, tried: bool) -> Forecast:
        raise CliError("model_type 'odd' is not served", 3)

    monkeypatch.setattr(verdict, "run_forecast", refused)
    assert sluice(capsys, "run", hub.name) == (3, "", "sluice run: model_type 'odd' is not served\n")
    assert fetched(hub) == []


def test_model_that_does_not_fit_is_refused_unless_the_user_insists(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "available_bytes", lambda: 1000)
    code, _, told = sluice(capsys, "run", hub.name, "--dry-run")
    assert code == 3 and "does not fit: its weights take" in told and fetched(hub) == []
    assert "org/tiny is org/tiny:Q4_0" in told, "not even the smallest"
    assert sluice(capsys, "run", hub.name, "--dry-run", "--anyway")[0] == 0


def test_full_disk_is_told_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdict, "free_disk", lambda folder: verdict.SPARE_DISK + 10)
    code, _, told = sluice(capsys, "run", hub.name)
    assert code == 3 and "does not fit on the disk" in told and fetched(hub) == []


def test_gated_repository_is_told_with_its_remedy(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.refusal = (403, "GatedRepo")
    code, _, told = sluice(capsys, "run", hub.name)
    assert code == 3 and "is gated: accept its terms" in told and "HF_TOKEN" in told


def bar_of(hub: Hub) -> tuple[str, list[str]]:
    """Fetches Q8_0 and returns what the bar showed, and the downloads."""
    settings, shown = command.Settings(), io.StringIO()
    judged = command._judge(settings).hub(f"{hub.name}:Q8_0")
    hub.downloads.clear()
    command.fetch_showing(judged.offer.model, settings, judged, shown)
    return shown.getvalue(), hub.downloads


def test_download_that_is_cut_continues_where_it_ended(
    hub: Hub, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.hf_hub.PAUSE_S", 0.0)
    monkeypatch.setattr("shared.hf_hub.PIECE", 1 << 16)
    settings = command.Settings()
    judged = command._judge(settings).hub(f"{hub.name}:Q4_0")
    hub.downloads.clear()
    hub.cuts = [len(tiny["Tiny-Q4_0.gguf"]) // 2]
    command.fetch_showing(judged.offer.model, settings, judged, io.StringIO())
    first, second = (int(download.partition("@")[2]) for download in hub.downloads)
    assert first == 0 and second > 1 << 16
    (path,), _ = command.fetch_model(f"{hub.name}:Q4_0", prefer_cache=True)
    assert path.read_bytes() == tiny["Tiny-Q4_0.gguf"]


def test_bar_shows_the_progress(hub: Hub) -> None:
    shown, downloads = bar_of(hub)
    assert downloads == ["Tiny-Q8_0.gguf@0"]
    assert "fetching org/tiny:Q8_0: 100 %" in shown


def test_wrong_hash_is_refused_and_nothing_is_kept(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.stated["Tiny-Q8_0.gguf"] = "0" * 64
    code, _, told = sluice(capsys, "run", f"{hub.name}:Q8_0")
    assert code == 3 and "the hub states 000" in told and "it was deleted; fetch it again" in told
    assert fetched(hub) == []


def test_names_mean_repositories_and_the_users_own_win(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "config" / "sluice" / "models.toml"
    own.parent.mkdir(parents=True)
    own.write_text(
        '[names]\n"qwen3:4b" = { repository = "org/tiny", choose = "Q4_0", '
        "flags = { max-seq-len = 64, prefix-cache = false } }"
    )
    code, out, _ = sluice(capsys, "run", "--list")
    assert code == 0 and "org/tiny:Q4_0 --max-seq-len=64 --no-prefix-cache" in out and "qwen3.8:27b" in out
    assert "Qwen/Qwen3-4B-GGUF" not in out
    assert "Qwen3:4B is org/tiny:Q4_0" in sluice(capsys, "run", "Qwen3:4B", "--dry-run")[2].splitlines()[0]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("x = 1", "'x' needs a repository"), ("x = { repository = 'a/b', size = 1 }", "'size' is none of"),
        ("x = { repository = 'a/b', flags = { bogus = 1 } }", "--bogus is no flag"), ("x = {", "cannot be read"),
        ("x = { repository = 'a/b', flags = { model = 'c' } }", "--model is no flag"),
    ],
)  # fmt: skip
def test_mistake_in_the_users_file_is_named(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, reason: str
) -> None:
    own = tmp_path / "config" / "sluice" / "models.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f"[names]\n{entry}\n")
    code, _, told = sluice(capsys, "run", "smollm2")
    assert code == 2 and reason in told and str(own) in told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["qwen3"], "did you mean qwen3:0.6b"), (["qwen3:5b"], "did you mean"), ([], "name of a model is missing"),
        (["demo", "--bogus"], "unknown flag --bogus"), (["demo", "--serve", "--system", "x"], "--system is for"),
        (["demo", "--port", "many"], "--port"), (["smollm3x"], "did you mean smollm2"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_at_once(
    hub: Hub, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    code, out, told = sluice(capsys, "run", *words)
    assert (code, out) == (2, "") and reason in told


def test_serve_gets_the_flags_of_the_name_and_of_the_user(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(command, "main", lambda words: started.append(words) or 0)
    monkeypatch.setattr(command, "find", lambda name: NamedModel("demo", ("--max-seq-len=64", "--no-prefix-cache")))
    monkeypatch.setenv("SLUICE_API_KEY", "of-the-environment")
    flags = ("--port", "1234", "--max-seq-len=32", "--api-key", "given")
    assert sluice(capsys, "run", "mine", "--serve", *flags)[0] == 0
    assert os.environ["SLUICE_API_KEY"] == "given", "no other user is to see it on a command line"
    assert started == [["serve", "--model=demo", "--max-seq-len=32", "--no-prefix-cache", "--port=1234"]]


def test_format_with_the_most_bits_that_is_fast_enough_is_chosen() -> None:
    offered = [["m-Q8_0.gguf"], ["m-Q4_K_M.gguf"], ["m-Q6_K.gguf"], ["m-BF16.gguf"], ["m-IQ2_XXS.gguf"]]
    ranked = ranked_formats(offered)
    assert [model[0][2:-5] for model in ranked] == ["Q8_0", "Q6_K", "Q4_K_M"]
    assert ranked_formats(offered[3:]) == offered[3:], "two bits in the file save no memory"
    sizes = {"m-Q8_0.gguf": 8 * GB, "m-Q6_K.gguf": 6 * GB, "m-Q4_K_M.gguf": 4 * GB}

    def chosen(read_gb_s: float, memory: int) -> str:
        speed = Speed(read_gb_s, 1.0, None)
        return best_format(ranked, ["m-Q4_K_M.gguf"], MIDDLE, speed, sizes, memory)[0][2:-5]

    assert chosen(200.0, 64 * GB) == "Q8_0", "all are fast enough"
    assert chosen(75.0, 64 * GB) == "Q6_K", "the best is too slow"
    assert chosen(10.0, 64 * GB) == "Q4_K_M", "all are slow: the fastest"
    assert chosen(200.0, 9 * GB) == "Q6_K", "the best leaves no room for a context"
    assert chosen(200.0, 3 * GB) == "Q4_K_M", "none fits, which the verdict then says"


def test_speed_falls_with_the_context_and_is_told() -> None:
    rates = [one.tokens_per_s(SPEED) or 0.0 for one in (replace(MIDDLE, sparse=True), MIDDLE)]
    assert 0 < rates[0] < rates[1]
    judged = Verdict(Offer("a/b:Q4_K_M", 4 * GB, GB), MIDDLE, SPEED, 16 * GB, 50 * GB, "Q8_0")
    assert judged.tokens_per_s is not None and 4 < judged.tokens_per_s < 5
    assert (MIDDLE.tokens_per_s(SPEED, 16_384) or 0.0) < judged.tokens_per_s
    assert judged.problem == ""
    assert any("1.0 GB to fetch of 4.0 GB; 50.0 GB are free" in line for line in judged.lines())
    assert any("memory at 20 GB/s" in line for line in judged.lines())
    tried = replace(judged, forecast=replace(MIDDLE, step_s=0.0496, kv_byte_s=0.0), speed=None)
    assert any("about 20 tokens/s, 20 at the end" in line and "tried" in line for line in tried.lines())
    assert any("unknown" in line for line in replace(judged, speed=None).lines())


def test_experts_that_are_not_chosen_are_not_read(tmp_path: Path) -> None:
    sparse = forecast_here(save("qwen3-moe", tmp_path / "sparse"), 8 * GB)
    dense = forecast_here(save("qwen3", tmp_path / "dense"), 8 * GB)
    assert sparse.sparse and sparse.read < sparse.weights - 1000 and dense.context == dense.trained and dense.pool > 0


@pytest.mark.slow
def test_name_leads_to_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    feed_stdin(monkeypatch, "What is the capital of France?\n")
    code, out, told = sluice(capsys, "run", "demo", "--max-seq-len=256")
    assert (code, out) == (0, "The capital of France is Paris.\n"), told
    assert "context" in told and "tokens/s" not in told, "a start does not wait for a trial"
    code, _, told = sluice(capsys, "run", "demo", "--dry-run")
    assert code == 0 and re.search(r"about \d+ tokens/s, .*as tried with some of its layers", told), told


@pytest.mark.slow
def test_server_that_does_not_start_is_told_with_its_reason() -> None:
    with pytest.raises(CliError, match="the server did not start"), command.served(["--model=/no/such"], sys.stderr):
        pass


def test_broken_folder_is_told_before_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(command, "measured_speed", lambda: pytest.fail("measured"))
    monkeypatch.setattr(verdict, "run_forecast", forecast_here)
    (tmp_path / "config.json").write_text("{}")
    code, _, told = sluice(capsys, "run", str(tmp_path), "--dry-run")
    assert code == 3 and f"{tmp_path} holds no weights" in told
    (tmp_path / "model.safetensors").write_bytes(b"x")
    code, _, told = sluice(capsys, "run", str(tmp_path), "--dry-run")
    assert code == 3 and "model_type" in told
