"""deploy/cli/processes.py: the launcher finds every mistake before it starts a process, and reports it once."""

import sqlite3
from pathlib import Path

import pytest

from deploy.cli.processes import check_before_start
from deploy.launcher.child_command import DEMO_MODEL, CliError
from frontend.kept.sqlite import open_file
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values

DEMO = {"model": str(DEMO_MODEL), "run_dir": "/tmp/none"}


def check(**values: object) -> None:
    check_before_start(with_values(Settings(), DEMO | values))


def test_good_settings_pass(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "template").write_text("{{ messages }}")
    check(api_keys=str(tmp_path / "keys"), chat_template=str(tmp_path / "template"))


@pytest.mark.parametrize("flag", ["api_keys", "ssl_certfile", "chat_template"])
def test_missing_file_is_an_error_of_its_flag(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')}.* /no/such"):
        check(**{flag: "/no/such"})


def test_adapter_that_cannot_be_used_is_an_error_of_its_flag(tmp_path: Path) -> None:
    for given, words in ((f"a={tmp_path}", r"adapter_config\.json is missing"), ("a", "NAME=PATH")):
        with pytest.raises(ConfigError, match=rf"^--lora-modules.*{words}"):
            check(lora_modules=given)


def test_folder_of_adapters_that_is_not_there_is_an_error_of_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(ConfigError, match=rf"^--allow-runtime-lora .*{name}: there is no such folder"):
            check(allow_runtime_lora=str(tmp_path / name))
    check(allow_runtime_lora=str(tmp_path))


def test_file_with_wrong_contents_is_an_error_of_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"^--chat-template .* does not compile: line 1"):
        check(chat_template=str(path))
    with pytest.raises(ConfigError, match=r"^--ssl-certfile .* hold no certificate"):
        check(ssl_certfile=str(path))
    with pytest.raises(ConfigError, match=r"^--curve-dir"):
        check(worker_addresses="tcp://127.0.0.1:1", curve_dir=str(tmp_path))


def test_folder_without_weights_is_code_3_unless_workers_are_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"^--model: .* is empty") as caught:
        check(model=str(tmp_path))
    assert caught.value.code == 3
    check(model=str(tmp_path), workers=0, worker_addresses="ipc:///tmp/none")


def test_store_that_is_a_folder_is_an_error_of_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--store {tmp_path}: it is a folder"):
        check(store=str(tmp_path))


def test_store_that_is_another_programs_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    text, foreign, own = (tmp_path / name for name in ("notes.txt", "browser.db", "answers.db"))
    text.write_text("buy milk")
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE visits (url TEXT)")
    db.close()
    before = foreign.read_bytes()
    problem = "it is a database of another program, with the table 'visits'; name another file"
    with pytest.raises(ConfigError, match=rf"^--store {foreign}: {problem}"):
        check(store=str(foreign))
    with pytest.raises(OSError, match="another program"):  # one that lies there later
        open_file(foreign)
    check(store=str(text))  # may be a damaged store: the server starts, and keeps nothing
    with pytest.raises(sqlite3.DatabaseError):
        open_file(text)
    assert foreign.read_bytes() == before and text.read_text() == "buy milk"
    assert sorted(tmp_path.iterdir()) == sorted([text, foreign])
    for _ in range(2):
        open_file(own).close()
        check(store=str(own))
