"""The certificate of https://, looked at before anything is opened. Serving with it is uvicorn's business."""

import ssl
from pathlib import Path

from shared.config import ConfigError, FrontendConfig


def check_tls(config: FrontendConfig) -> None:
    """Raises ConfigError, in one sentence, for what uvicorn would fail on with a trace."""
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
        raise ConfigError(f"{flags} are no certificate with its key: {error.reason or error}") from error


def _no_password() -> str:
    raise ConfigError("the key of --ssl-certfile is encrypted; Sluice has nowhere to ask for its password")
