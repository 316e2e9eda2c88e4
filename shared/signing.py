"""Signatures of receipts: Ed25519 (RFC 8032), made and checked by `cryptography`, which is an optional dependency.

The signed bytes are the receipt without its signature, as canonical JSON: keys in order, no spaces, UTF-8, and whole
numbers without a fraction. Knows no field of a receipt.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.config.declaration import ConfigError
from shared.private_files import is_open_to_others

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM: Literal["ed25519"] = "ed25519"
Check = Literal["valid", "invalid", "absent", "unchecked"]


class Signer:
    """Signs with one private key."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key
        self.public_key = _text(key.public_key().public_bytes_raw())  # base64 of 32 bytes

    @classmethod
    def load(cls, path: str) -> "Signer | None":
        """Returns a signer with the key in a file (PEM, PKCS #8); None for an empty path. Raises ConfigError."""
        if not path:
            return None
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError:
            raise ConfigError("--receipt-key needs the package cryptography: pip install cryptography") from None
        try:
            is_open, pem = is_open_to_others(path), Path(path).read_bytes()
            key = load_pem_private_key(pem, None)
        except OSError as error:
            raise ConfigError(f"--receipt-key: {path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, ArithmeticError):
            raise ConfigError(f"--receipt-key: {path} is no private key in PEM without a password") from None
        if is_open:
            raise ConfigError(f"--receipt-key: {path} may be read by others (chmod 600 it)")
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"--receipt-key: {path} has no Ed25519 key; `sluice keygen --receipt-key` makes one")
        return cls(key)

    def sign(self, content: Mapping[str, Any]) -> str:
        """Returns the signature of a JSON object, in base64."""
        return _text(self._key.sign(canonical(content)))


def check(content: Mapping[str, Any], public_key: str, value: str) -> Check:
    """Checks the signature `value` (base64) of a JSON object. Returns "unchecked" if cryptography is not installed."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return "unchecked"
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
        key.verify(base64.b64decode(value, validate=True), canonical(content))
    except (InvalidSignature, ValueError, binascii.Error):
        return "invalid"
    return "valid"


def canonical(content: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as canonical JSON, the bytes that are signed."""
    return json.dumps(_whole(content), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _whole(value: Any) -> Any:
    """Returns the value with whole floats as integers, because JavaScript writes whole numbers without a fraction."""
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case dict():
            return {name: _whole(one) for name, one in value.items()}
        case list():
            return [_whole(one) for one in value]
    return value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
