"""`sluice verify RECEIPT --request FILE`: checks receipts on a running server, or with a model loaded for the check.

Exit code 0: every recomputed answer is identical to its receipt, and no signature is wrong; 1: an answer differs or a
signature is wrong; 2: the receipts could not be checked.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.launcher.child_command import CliError
from shared.config.flags import Parser

NOT_CHECKED = 2
SIGNATURES = {
    "valid": "; signature valid",
    "invalid": "; signature INVALID",
    "absent": "",
    "unchecked": "; signature not checked: pip install cryptography",
}
DESCRIPTION = (
    "Check the receipts of an answer. Exit code 0: the request gives this answer; 1: it gives another one; 2: this "
    "could not be checked."
)

Object = dict[str, Any]


def parser() -> Parser:
    parser = Parser(prog="sluice verify", description=DESCRIPTION)
    parser.add_argument("receipt", metavar="RECEIPT", help="file with a receipt, or with an answer that has receipts")
    parser.add_argument(
        "--request", metavar="FILE", required=True, help="file with the body of the request, as it was sent"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", metavar="URL", default=DEFAULT_URL, help=f"the server that checks them [default {DEFAULT_URL}]"
    )
    where.add_argument("--model", metavar="MODEL", help="check them without a server, with this model")
    add_key(parser)
    parser.add_argument("--force", action="store_true", help="check a receipt of another fingerprint, too")
    return parser


def verify(words: list[str]) -> int:
    """Prints a line for each receipt, and returns the exit code."""
    args = parser().read(words)
    receipts, request = list(_receipts(_read(args.receipt))), _read(args.request)
    if not receipts:
        raise CliError(f"{args.receipt} has no receipt: requests ask for one with `receipt`: true", NOT_CHECKED)
    bodies = [{"receipt": receipt, "request": request, "force": args.force} for receipt in receipts]
    results = _by_model(args.model, bodies) if args.model else _by_server(Server(args.url, args.api_key), bodies)
    for receipt, result in zip(receipts, results, strict=True):
        print(_line(receipt, result))
    return 0 if all(map(_proven, results)) else 1


def _read(path: str) -> Object:
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", NOT_CHECKED) from error
    except ValueError as error:
        raise CliError(f"{path} is not JSON: {error}", NOT_CHECKED) from error
    if not isinstance(content, dict):
        raise CliError(f"{path} must hold a JSON object", NOT_CHECKED)
    return content


def _receipts(content: Object) -> Iterator[Object]:
    """Yields the receipts of an answer, or the object itself if it is a receipt."""
    if "output_ids" in content:
        yield content
        return
    choices = content.get("choices")
    for holder in (content, *(choices if isinstance(choices, list) else ())):
        if isinstance(holder, dict) and isinstance(holder.get("receipt"), dict):
            yield holder["receipt"]


def _by_server(server: Server, bodies: list[Object]) -> list[Object]:
    try:
        return [server.post("receipts/verify", body) for body in bodies]
    except CliError as error:
        raise CliError(error, NOT_CHECKED) from error


def _by_model(model: str, bodies: list[Object]) -> list[Object]:
    from deploy.offline.llm import LLM
    from frontend.errors import SluiceError

    try:
        with LLM(model) as llm:
            return [llm.verify(**body) for body in bodies]
    except SluiceError as error:
        raise CliError(error.message, NOT_CHECKED) from error


def _proven(result: Object) -> bool:
    return bool(result["identical"]) and result["signature"] != "invalid"


def _line(receipt: Object, result: Object) -> str:
    verdict = f"identical, {result['tokens']} tokens" if result["identical"] else f"not identical: {result['reason']}"
    if not result["fingerprint_matches"]:
        theirs, ours = (one["fingerprint"] or "unknown" for one in (receipt, result))
        verdict += f"; made with fingerprint {theirs}, not {ours}"
    return f"choice {receipt['index']}: {verdict}{SIGNATURES[result['signature']]}"
