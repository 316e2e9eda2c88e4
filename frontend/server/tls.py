"""The certificate of https://, checked before anything is opened, and what closing a connection over TLS needs to know.

Serving with it is uvicorn's business.
"""

import asyncio
import contextlib
import fcntl
import ssl
import termios
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
        raise ConfigError(f"{flags} hold no certificate with its key: {error.reason or error}") from error


def _no_password() -> str:
    raise ConfigError("the key of --ssl-certfile is encrypted; Sluice has nowhere to ask for its password")


def waits_for_close_notify(transport: asyncio.Transport) -> bool:
    """Whether it is closing over TLS, where the client has to answer; one that keeps idle connections does not."""
    return transport.is_closing() and not transport.can_write_eof()


def has_unsent(transport: asyncio.Transport) -> bool:
    """Whether the client's system has yet to confirm some of what was written, as long as there is a connection."""
    left = bytearray(4)
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, left)
    return any(left)
