"""frontend/server/access.py. Over HTTP: tests/frontend/api/test_app.py."""

import hashlib
import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from frontend.errors import Unauthorized
from frontend.server.access import ApiKeys
from shared.config.declaration import ConfigError


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def write(file: Path, text: str, stamp: int) -> None:
    file.write_text(text)
    file.chmod(0o600)
    os.utime(file, ns=(stamp, stamp))


def test_without_a_file_every_request_has_the_empty_tenant() -> None:
    assert ApiKeys("").identify(Headers({})) == ""


def test_key_identifies_its_tenant_in_either_header(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-one alice\nsk-new   alice  # the next one\nsk-two\n")
    file.chmod(0o600)
    keys = ApiKeys(str(file))
    assert keys.identify(bearer("sk-one")) == keys.identify(Headers({"x-api-key": "sk-new"})) == "alice"
    assert keys.identify(bearer("sk-two")) == f"key-{hashlib.sha256(b'sk-two').hexdigest()[:8]}"


@pytest.mark.parametrize("header", [{}, {"authorization": "sk-one"}, {"x-api-key": "alice"}, {"x-api-key": ""}])
def test_wrong_or_missing_key_is_unauthorized(tmp_path: Path, header: dict[str, str]) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one alice\n")
    file.chmod(0o600)
    with pytest.raises(Unauthorized):
        ApiKeys(str(file)).identify(Headers(header))


def test_changed_file_is_reread_at_the_next_request(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "sk-old\n", 1)
    keys = ApiKeys(str(file))
    write(file, "sk-new bob\n", 2)
    assert keys.identify(bearer("sk-new")) == "bob"
    with pytest.raises(Unauthorized):
        keys.identify(bearer("sk-old"))


def test_unusable_file_leaves_the_keys_as_they_were_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    write(file, "sk-one alice\n", 1)
    keys = ApiKeys(str(file))
    write(file, "sk-two\nsk-three a/b\n", 2)
    assert [keys.identify(bearer("sk-one")) for _ in range(2)] == ["alice", "alice"]
    assert caplog.text.count("line 2") == 1 and "sk-three" not in caplog.text


@pytest.mark.parametrize("text", ["", "# nothing\n", "sk-one alice in wonderland\n"])
def test_file_without_valid_keys_is_refused_at_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--api-keys") as problem:
        ApiKeys(str(file))
    assert "sk-one" not in str(problem.value)


def test_keys_of_settings_and_of_the_file_are_equal(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-one alice\n")
    (tmp_path / "keys").chmod(0o600)
    for keys in (ApiKeys("", ["sk-two", "#x"]), ApiKeys(str(tmp_path / "keys"), ["sk-two", "#x"])):
        assert keys.identify(bearer("sk-two")) == f"key-{hashlib.sha256(b'sk-two').hexdigest()[:8]}"
        assert keys.identify(bearer("#x"))
        with pytest.raises(Unauthorized):
            keys.identify(bearer("sk-three"))
    assert keys.identify(bearer("sk-one")) == "alice"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path / "keys", "sk-one alice\n", 1)
    (tmp_path / "keys").chmod(mode)
    with pytest.raises(ConfigError, match=r"--api-keys: .*keys may be read by others \(chmod 600 it\)"):
        ApiKeys(str(tmp_path / "keys"))


def test_changed_file_that_others_may_read_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "sk-one alice\n", 1)
    keys = ApiKeys(str(file))
    write(file, "sk-two bob\n", 2)
    file.chmod(0o644)
    assert keys.identify(bearer("sk-one")) == "alice"
    file.chmod(0o600)
    assert keys.identify(bearer("sk-two")) == "bob"
