"""frontend/server/access.py. tests/e2e/test_secrets.py has real certificates."""

from pathlib import Path

import pytest

from frontend.server.access import check_tls
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig


def test_no_certificate_needs_no_check() -> None:
    check_tls(FrontendConfig())


def test_key_without_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ssl-keyfile needs --ssl-certfile"):
        check_tls(FrontendConfig(ssl_keyfile=str(tmp_path / "key.pem")))


def test_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ssl-certfile .*none\.pem cannot be read"):
        check_tls(FrontendConfig(ssl_certfile=str(tmp_path / "none.pem")))


def test_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="hold no certificate with its key"):
        check_tls(FrontendConfig(ssl_certfile=str(file)))
