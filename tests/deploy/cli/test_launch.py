"""`sluice launch` writes what each client reads, and starts a program that stands in for it."""

import json
import os
import stat
import subprocess
import sys
import tomllib
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
    files = {path.name: path for path in folder.iterdir()} if folder.exists() else {}
    assert sorted(files) == sorted(CLIENTS[client].files)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.values())
    told = json.dumps([args, {name: env.get(name) for name in CLIENTS[client].env}, [*map(parsed, files.values())]])
    assert json.dumps(ODD)[1:-1] in told and server.url in told and "sk-1" in told
    assert all(name in env for name in CLIENTS[client].env)


def test_files_say_what_the_clients_read(tmp_path: Path) -> None:
    found = {}
    for name in ("codex", "opencode", "aider", "continue"):
        for path, text in configured(CLIENTS[name], tmp_path, "host:1/v1/", "", ODD, 4096).files.items():
            path.write_text(text)
            found[name] = parsed(path)
    codex, opencode, aider, continued = found["codex"], found["opencode"], found["aider"], found["continue"]
    assert codex["model"] == ODD and codex["model_context_window"] == 4096  # type: ignore[index]
    provider = codex["model_providers"][codex["model_provider"]]  # type: ignore[index]
    assert (provider["base_url"], provider["wire_api"]) == ("http://host:1/v1", "responses")
    name, _, model = opencode["model"].partition("/")  # type: ignore[index]
    limit = opencode["provider"][name]["models"][model]["limit"]  # type: ignore[index]
    assert model == ODD and limit == {"context": 4096, "output": 1024}
    assert aider == {f"openai/{ODD}": {
        "litellm_provider": "openai", "mode": "chat", "max_input_tokens": 4096, "max_output_tokens": 1024,
    }}  # fmt: skip
    (model,) = continued["models"]  # type: ignore[index]
    assert (model["model"], model["apiBase"], model["apiKey"]) == (ODD, "http://host:1/v1", "none")


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
