"""A server with TLS, API keys and debug logs: it serves clients with a key and reveals no secret."""

import ssl
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from frontend.__main__ import serve
from frontend.server.access import check_tls
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig
from shared.config.settings import Settings
from tests.e2e.server import serving
from tests.patience import PATIENCE_S

KEY, WRONG, BASIC, PROMPT = "sk-distinctive-Zq7", "sk-rejected-Xw9", "bm90IGEga2V5", "the cellar of the zebrafinch"
SECRETS = (KEY, WRONG, BASIC, PROMPT, "zebrafinch")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Makes a self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def test_secrets_with_tls_and_debug_logs_are_never_revealed(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    trust = ssl.create_default_context(cafile=certificate[0])
    flags = ["--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])]
    flags += ["--log-level", "debug", "--api-keys", str(keys)]
    log = tmp_path / "log"
    with serving("demo", log, *flags, trust=trust) as server:
        http, mine = server.client, {"Authorization": f"Bearer {KEY}"}
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
        chat = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
        assert http.post("/v1/completions", json=body, headers=mine).status_code == 200
        assert "[DONE]" in http.post("/v1/chat/completions", json=chat, headers=mine).text
        strangers = {"Authorization": f"Bearer {WRONG}"}, {"X-Api-Key": WRONG}, {"Authorization": f"Basic {BASIC}"}
        told = [http.post("/v1/completions", json=body, headers=headers) for headers in strangers]
        assert [answer.status_code for answer in told] == [401] * 3
        bad = {"model": PROMPT}, {"messages": [{"role": PROMPT * 8, "content": PROMPT}]}, {"seed": PROMPT}
        for change in bad:
            refused = http.post("/v1/chat/completions", json=chat | change, headers=mine)
            assert 400 <= refused.status_code < 500
        http.post("/v1/completions", content=PROMPT.encode(), headers=mine)
        told += [http.get(path, headers=mine) for path in ("/stats", "/metrics", "/v1/models")]
        for answer in told:
            assert not any(secret in answer.text for secret in SECRETS)
        wait_for(log, "https://127.0.0.1")
        family = psutil.Process(server.process.pid)
        for process in (family, *family.children(recursive=True)):
            words = " ".join([*process.cmdline(), *process.environ().values()])
            assert not any(secret in words for secret in SECRETS)
    text = log.read_text()
    assert "curl -N -k https://127.0.0.1" in text and "Traceback" not in text
    assert [secret for secret in SECRETS if secret in text] == []


def wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ssl_certfile": "/nowhere/cert.pem"}, "--ssl-certfile /nowhere/cert.pem cannot be read: No such file"),
        ({"ssl_keyfile": "{key}"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "{cert}"}, "--ssl-certfile {cert} hold no certificate with its key"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{cert}"}, "--ssl-certfile and --ssl-keyfile hold no certificate"),
        ({"ssl_certfile": "{cert}", "ssl_keyfile": "{other}"}, "--ssl-certfile and --ssl-keyfile hold no certificate"),
    ],
)
def test_tls_files_invalid_are_refused_in_one_sentence(
    certificate: tuple[Path, Path], files: dict[str, str], said: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    command = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", str(other)]
    subprocess.run(command, check=True, capture_output=True)
    names = {"cert": certificate[0], "key": certificate[1], "other": other}
    config = FrontendConfig(**{flag: file.format(**names) for flag, file in files.items()})
    with pytest.raises(ConfigError) as error:
        serve(Settings(frontend=config), [])
    assert str(error.value).startswith(said.format(**names))


@pytest.mark.parametrize("separate", [True, False])
def test_tls_key_that_others_may_read_is_refused(
    certificate: tuple[Path, Path], tmp_path: Path, separate: bool
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(certificate[1].read_bytes() + (b"" if separate else certificate[0].read_bytes()))
    files = {"ssl_certfile": certificate[0], "ssl_keyfile": key} if separate else {"ssl_certfile": key}
    config = FrontendConfig(**{name: str(file) for name, file in files.items()})
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"key.pem has a private key and may be read by others \(chmod 600 it\)"):
        check_tls(config)
    key.chmod(0o600)
    check_tls(config)
