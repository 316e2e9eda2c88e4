"""`sluice probe URL`: a health check for containers, which have no curl.

The probe checks that the status is 200 and, with a flag, the age of the last step in a worker's /metrics. It exits with
0 or 1.
"""

import http.client
import re
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from deploy.cli.http_client import BAD_URL_EXIT_CODE, check_letters
from deploy.launcher.child_command import CliError
from shared.config.flags import Parser, positive_float

STEP_AGE = re.compile(rb"^\S*worker_last_step_age_seconds(?:\{.*\})? (\S+)$", re.MULTILINE)


def parser() -> Parser:
    parser = Parser(
        prog="sluice probe", description="Check the health of a process: exit with 0 if it answers 200, else with 1."
    )
    parser.add_argument("url", metavar="URL", help="a frontend's /health or /ready, or a worker's /metrics")
    parser.add_argument(
        "--max-step-age",
        metavar="X",
        type=positive_float,
        help="for a worker: maximum seconds since the last progress of its compute loop",
    )
    parser.add_argument(
        "--timeout", metavar="X", type=positive_float, default=4.0, help="seconds to wait for the answer [default 4]"
    )
    parser.add_argument("--insecure", action="store_true", help="accept any certificate")
    return parser


def probe(words: list[str]) -> int:
    args = parser().read(words)
    if not args.url.startswith(("http://", "https://")):
        raise CliError(f"{args.url} does not begin with http:// or https://", BAD_URL_EXIT_CODE)
    _check(args.url)
    text = _get(args.url, args.timeout, insecure=args.insecure)
    if args.max_step_age is not None:
        _check_age(text, args.max_step_age)
    return 0


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:
            raise ValueError("it names no host and port")
        check_letters(parts)
    except ValueError as error:
        raise CliError(f"{url} is no URL: {error}", BAD_URL_EXIT_CODE) from error


def _get(url: str, timeout: float, *, insecure: bool) -> bytes:
    """Returns the body at `url`. Never uses a proxy: the probed process runs next to the probe."""
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


def _check_age(text: bytes, limit: float) -> None:
    match = STEP_AGE.search(text)
    if match is None:
        raise CliError("the answer has no worker_last_step_age_seconds", 1)
    if (age := float(match[1])) > limit:
        raise CliError(f"the compute loop has made no progress for {age:.1f} s", 1)
