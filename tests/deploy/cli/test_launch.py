"""`sluice launch` writes what each client reads, and starts a program that stands in for it."""

import json
import os
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from deploy.cli.launch import CLIENTS, configured
from tests.deploy.cli.harness import ScriptedServer, scripted_server, sluice

ODD = 'Qwen/Qwen3 "4B" $x'  # a name that must be quoted everywhere
MODELS = json.dumps({"data": [{"id": ODD, "max_model_len": 4096}, {"id": "second", "max_model_len": None}]}).encode()
FAKE = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


def started(server: ScriptedServer, folder: Path, *words: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `sluice launch` in a process whose PATH has only the fake program."""
    (bin_folder := folder / "bin").mkdir(exist_ok=True)
    if program:
        (bin_folder / program).write_text(FAKE)
        (bin_folder / program).chmod(0o755)
    env = {"PATH": str(bin_folder), "XDG_CONFIG_HOME": str(folder / "config"), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "deploy.cli.main", "launch", *words, "--url", server.url]
    if "--" in words:
        at = command.index("--")
        command = [*command[:at], *command[-2:], *command[at:-2]]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def parsed(path: Path) -> object:
    readers = {".toml": tomllib.loads, ".json": json.loads, ".yaml": yaml.safe_load}
    read: object = readers[path.suffix](path.read_text())
    return read


@pytest.mark.parametrize("client", CLIENTS)
def test_client_is_started_with_files_that_only_its_user_reads(tmp_path: Path, client: str) -> None:
    with scripted_server() as server:
        server.models = MODELS
        ran = started(server, tmp_path, client, "--api-key", "sk-1", "--", "run", "-x", program=CLIENTS[client].program)
        assert ran.returncode == 7, ran.stderr
        args, env = json.loads(ran.stdout)
    assert server.keys == ["Bearer sk-1"] and args[-2:] == ["run", "-x"]
    folder = tmp_path / "config" / "sluice" / "clients" / client
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert sorted(files) == sorted(CLIENTS[client].files)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.values())
    told = json.dumps([args, {name: env.get(name) for name in CLIENTS[client].env}, [*map(parsed, files.values())]])
    assert json.dumps(ODD)[1:-1] in told and server.url in told and "sk-1" in told
    assert all(name in env for name in CLIENTS[client].env)


def test_files_say_what_the_clients_read(tmp_path: Path) -> None:
    found = {}
    for name in ("codex", "opencode", "aider", "continue", "qwen-code", "pi"):
        for path, text in configured(CLIENTS[name], tmp_path, "host:1/v1/", "", ODD, 32768).files.items():
            path.write_text(text)
            found[name] = parsed(path)
    codex, opencode, aider, continued = found["codex"], found["opencode"], found["aider"], found["continue"]
    assert codex["model"] == ODD and codex["model_context_window"] == 32768  # type: ignore[index]
    provider = codex["model_providers"][codex["model_provider"]]  # type: ignore[index]
    assert (provider["base_url"], provider["wire_api"]) == ("http://host:1/v1", "responses")
    assert provider["supports_websockets"] is True
    name, _, model = opencode["model"].partition("/")  # type: ignore[index]
    limit = opencode["provider"][name]["models"][model]["limit"]  # type: ignore[index]
    assert model == ODD and limit == {"context": 32768, "output": 8192}
    assert aider == {f"openai/{ODD}": {
        "litellm_provider": "openai", "mode": "chat", "max_input_tokens": 32768, "max_output_tokens": 8192,
    }}  # fmt: skip
    assert found["qwen-code"] == {"model": {"generationConfig": {"contextWindowSize": 32768}}}
    (model,) = found["pi"]["providers"]["sluice"]["models"]  # type: ignore[index]
    assert model == {"id": ODD, "contextWindow": 32768, "maxTokens": 8192}
    (model,) = continued["models"]  # type: ignore[index]
    assert (model["model"], model["apiBase"], model["apiKey"]) == (ODD, "http://host:1/v1", "none")


def test_cline_finds_provider_and_limits_in_its_data_folder(tmp_path: Path) -> None:
    made = configured(CLIENTS["cline"], tmp_path, "host:1", "sk-1", ODD, 32768)
    assert made.command == ("cline", "--data-dir", str(tmp_path))
    files = {path.name: json.loads(text) for path, text in made.files.items()}
    assert {path.parent for path in made.files} == {tmp_path / "settings"}
    name = files["providers.json"]["lastUsedProvider"]
    settings = files["providers.json"]["providers"][name]["settings"]
    assert settings == {"provider": name, "apiKey": "sk-1", "model": ODD, "baseUrl": "http://host:1/v1"}
    model = files["models.json"]["providers"][name]["models"][ODD]
    assert model == {"id": ODD, "contextWindow": 32768, "maxTokens": 8192}


@pytest.mark.parametrize("client", CLIENTS)
def test_longest_answer_leaves_room_for_the_clients_own_instructions(tmp_path: Path, client: str) -> None:
    """opencode compacts for ever, and Claude Code gives up, where context less answer has no room for them."""
    chosen = CLIENTS[client]
    for context in (chosen.instructions + 100, chosen.instructions + 5000, 131072):
        made = configured(replace(chosen, files={"x.json": "[$output]"}), tmp_path, "host:1", "", ODD, context)
        (limit,) = json.loads(made.files[tmp_path / "x.json"])
        assert 1 <= limit <= context // 4 and limit + chosen.instructions < context


def test_context_that_is_too_short_for_the_client_is_told(tmp_path: Path) -> None:
    with scripted_server() as server:
        server.models = MODELS
        short = started(server, tmp_path, "opencode", program="opencode")
        enough = started(server, tmp_path, "opencode", "--context", "32768", program="opencode")
    assert (short.returncode, enough.returncode) == (7, 7)
    assert "4,096" in short.stderr and "7,300" in short.stderr and short.stderr.count("\n") == 1
    assert enough.stderr == ""


def test_print_writes_and_starts_nothing(tmp_path: Path) -> None:
    with scripted_server() as server:
        server.models = MODELS
        ran = started(server, tmp_path, "opencode", "--print", program="opencode")
    assert ran.returncode == 0 and not (tmp_path / "config").exists()
    head, *_, command = ran.stdout.splitlines()
    assert head.endswith("/opencode/opencode.json") and command.startswith("OPENCODE_CONFIG=")
    assert command.endswith(" opencode")


def test_client_that_is_not_installed_is_named_with_its_files(tmp_path: Path) -> None:
    with scripted_server() as server:
        server.models = MODELS
        ran = started(server, tmp_path, "codex")
    assert ran.returncode == 1 and "codex is not installed: its configuration is in " in ran.stderr
    assert "npm install -g @openai/codex" in ran.stderr
    assert (tmp_path / "config" / "sluice" / "clients" / "codex" / "config.toml").exists()


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server() as server:
        server.models = MODELS
        for words, code, part in (
            (("nothing", "--url", server.url), 2, "codex"),
            (("codex", "--url", server.url, "--model", "third"), 2, "--model third"),
            (("codex", "--url", server.url, "--model", "second"), 1, "--context"),
            (("codex", "--url", "http://127.0.0.1:9"), 1, "no answer"),
        ):
            status, out, err = sluice(capsys, "launch", *words)
            assert (status, out) == (code, "") and part in err and err.count("\n") == 1, err
        words = ("codex", "--print", "--url", server.url, "--model", "second", "--context", "100")
        assert sluice(capsys, "launch", *words)[0] == 0
