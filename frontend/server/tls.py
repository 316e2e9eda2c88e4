"""Checks the TLS certificate of https:// before any port is opened. uvicorn then serves with it."""

import ssl
from pathlib import Path

from shared.config import ConfigError, FrontendConfig
from shared.private_files import is_open_to_others


def check_tls(config: FrontendConfig) -> None:
    """Checks certificate and key. Raises ConfigError, which says in one sentence what uvicorn would fail on."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if key and not certificate:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            Path(path).read_bytes() if path else b""
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if not certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key or None, password=_no_password)
    except ssl.SSLError as error:
        flags = "--ssl-certfile and --ssl-keyfile" if key else f"--ssl-certfile {certificate}"
        raise ConfigError(f"{flags} hold no certificate with its key: {error.reason or error}") from error
    flag, secret = ("--ssl-keyfile", key) if key else ("--ssl-certfile", certificate)
    if is_open_to_others(secret):
        raise ConfigError(f"{flag} {secret} has a private key and may be read by others (chmod 600 it)")


def _no_password() -> str:
    raise ConfigError("the key of --ssl-certfile is encrypted, and Sluice cannot ask for its password")
