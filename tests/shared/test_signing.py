"""Signatures of receipts, and the files of their keys."""

import base64
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from shared.config.declaration import ConfigError
from shared.signing import Signer, canonical, check


def pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    pkcs8, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, none)


def test_signature_holds_for_equal_content_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(pem(ed25519.Ed25519PrivateKey.generate()))
    (tmp_path / "key").chmod(0o600)
    signer = Signer.load(str(tmp_path / "key"))
    assert signer is not None
    value = signer.sign({"b": [1.0, 0.7], "a": "ä"})
    assert check({"a": "ä", "b": [1, 0.7]}, signer.public_key, value) == "valid"
    assert check({"a": "ä", "b": [1, 0.8]}, signer.public_key, value) == "invalid"
    other = base64.b64encode(ed25519.Ed25519PrivateKey.generate().public_key().public_bytes_raw()).decode()
    assert check({"a": "ä", "b": [1, 0.7]}, other, value) == "invalid"


@pytest.mark.parametrize(("key", "value"), [("", ""), ("x", "y"), ("AAAA", "AAAA"), ("ä", "ä")])
def test_malformed_signature_is_invalid(key: str, value: str) -> None:
    assert check({}, key, value) == "invalid"


def test_canonical_json_is_ordered_and_has_no_spaces() -> None:
    assert canonical({"b": {"z": 1.0, "y": None}, "a": [0.25, "é"]}) == '{"a":[0.25,"é"],"b":{"y":null,"z":1}}'.encode()


def test_signer_without_a_file_signs_nothing() -> None:
    assert Signer.load("") is None


def test_unusable_key_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    (tmp_path / "curve").write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    (tmp_path / "curve").chmod(0o600)
    for name, words in (("none", "cannot be read"), ("text", "no private key in PEM"), ("curve", "no Ed25519 key")):
        with pytest.raises(ConfigError, match=f"--receipt-key: .*{name}.* {words}"):
            Signer.load(str(tmp_path / name))


def test_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(pem(ed25519.Ed25519PrivateKey.generate()))
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"--receipt-key: .*key may be read by others \(chmod 600 it\)"):
        Signer.load(str(tmp_path / "key"))


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(ConfigError, match="needs the package cryptography"):
        Signer.load(str(tmp_path / "key"))
    assert check({}, "", "") == "unchecked"
