"""`sluice probe URL`: is that process well? For health checks of containers, which have no curl.

Knows two signs: an answer of 200, and, in a worker's /metrics, the age of the last step. Exit code 0 or 1.
"""

import http.client
import re
import ssl
import urllib.error
import urllib.request

from deploy.supervisor.child_command import CliError
from shared.arguments import positive_float
from shared.flags import Parser

AGE = re.compile(rb"^\S*worker_last_step_age_seconds (\S+)$", re.MULTILINE)


def parser() -> Parser:
    made = Parser(prog="sluice probe", description="Exits with 0 if a process answers that it is well, else with 1.")
    made.add_argument("url", metavar="URL", help="a frontend's /health or /ready, or a worker's /metrics")
    made.add_argument(
        "--max-step-age",
        metavar="X",
        type=positive_float,
        help="of a worker: seconds since its compute loop last moved",
    )
    made.add_argument(
        "--timeout", metavar="X", type=positive_float, default=4.0, help="seconds to wait for it [default 4]"
    )
    made.add_argument("--insecure", action="store_true", help="take any certificate")
    return made


def probe(words: list[str]) -> int:
    given = parser().read(words)
    if not given.url.startswith(("http://", "https://")):
        raise CliError(f"{given.url} does not begin with http:// or https://", 2)
    text = _get(given.url, given.timeout, insecure=given.insecure)
    if given.max_step_age is not None:
        _check_age(text, given.max_step_age)
    return 0


def _get(url: str, timeout: float, *, insecure: bool) -> bytes:
    """Never through a proxy: it asks what runs beside it."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(url, timeout=timeout) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise CliError(f"{url} answers {error.code}: {error.read(300).decode(errors='replace')}", 1) from error
    except (OSError, http.client.HTTPException) as error:
        raise CliError(f"{url} does not answer: {getattr(error, 'reason', error)}", 1) from error


def _check_age(text: bytes, most: float) -> None:
    found = AGE.search(text)
    if found is None:
        raise CliError("there is no worker_last_step_age_seconds in what it says", 1)
    if (age := float(found[1])) > most:
        raise CliError(f"the compute loop has not moved for {age:.1f} s", 1)
