"""`sluice keygen`: the files that it makes. tests/worker/engine/test_auth.py shows that ZeroMQ accepts the keys."""

import stat
from pathlib import Path

import pytest

from shared.signing import Signer
from tests.deploy.cli.harness import sluice


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_keygen_makes_private_pairs_and_admits_the_frontend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    code, out, _ = sluice(capsys, "keygen", str(folder))
    assert code == 0 and "frontend.key_secret and worker.key" in out
    assert files(folder) == {
        "worker.key", "worker.key_secret", "frontend.key", "frontend.key_secret", "allowed/frontend.key",
    }  # fmt: skip
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in files(folder))
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "allowed")} == {0o700}


def test_keygen_add_makes_one_more_frontend_and_keeps_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sluice(capsys, "keygen", str(tmp_path))
    worker = (tmp_path / "worker.key_secret").read_bytes()
    code, out, _ = sluice(capsys, "keygen", str(tmp_path), "--add", "second")
    assert code == 0 and "second.key_secret as frontend.key_secret" in out
    assert {"second.key", "second.key_secret", "allowed/second.key"} < files(tmp_path)
    assert (tmp_path / "worker.key_secret").read_bytes() == worker


def test_keygen_leaves_a_folder_of_other_programs_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").touch()
    tmp_path.chmod(0o755)
    code, _, err = sluice(capsys, "keygen", str(tmp_path))
    assert code == 1 and f"{tmp_path} is used by other programs" in err
    assert files(tmp_path) == {"other"} and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_keygen_replaces_keys_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sluice(capsys, "keygen", str(tmp_path))
    worker = (tmp_path / "worker.key_secret").read_bytes()
    code, _, err = sluice(capsys, "keygen", str(tmp_path))
    assert code == 1 and "already has frontend.key" in err and "--force replaces them" in err
    assert (tmp_path / "worker.key_secret").read_bytes() == worker
    assert sluice(capsys, "keygen", str(tmp_path), "--force")[0] == 0
    assert (tmp_path / "worker.key_secret").read_bytes() != worker


@pytest.mark.parametrize("name", ["worker", "a/b", "../b", "a b"])
def test_keygen_refuses_a_bad_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, _, err = sluice(capsys, "keygen", str(tmp_path), "--add", name)
    assert code == 2 and err.startswith(f"sluice keygen: --add {name}: a frontend's name may contain")
    assert not files(tmp_path)


def test_keygen_in_an_unusable_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, _, err = sluice(capsys, "keygen", str(tmp_path / "file"))
    assert code == 1 and err.startswith(f"sluice keygen: cannot make keys in {tmp_path / 'file'}: ")
    assert err.count("\n") == 1


def test_keygen_makes_a_private_key_for_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "receipts.pem"
    code, out, _ = sluice(capsys, "keygen", "--receipt-key", str(file))
    signer = Signer.load(str(file))
    assert signer is not None and signer.public_key in out and code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and files(tmp_path) == {"receipts.pem"}
    code, _, err = sluice(capsys, "keygen", "--receipt-key", str(file))
    assert code == 1 and "exists; --force replaces it" in err
    assert sluice(capsys, "keygen", "--receipt-key", str(file), "--force")[0] == 0
    again = Signer.load(str(file))
    assert again is not None and again.public_key != signer.public_key


def test_keygen_wants_one_of_a_folder_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), (str(tmp_path), "--receipt-key", "x")):
        code, _, err = sluice(capsys, "keygen", *words)
        assert code == 2 and "name a folder for CURVE keys, or a file with --receipt-key" in err
