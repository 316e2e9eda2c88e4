"""`sluice chat` and `sluice complete`: a server's answers at the terminal, as they are written.

Knows the terminal; what a server says comes from client.py. In a chat Ctrl-C stops the answer, and at the prompt it
leaves. When nobody sits there (input from a file or a pipe), there are no prompts and the first failure ends it.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from deploy.cli.http_client import Server
from deploy.supervisor.child_command import CliError
from shared.flags import Parser

URL = "http://127.0.0.1:8000"
HELP = "/reset begins anew, /system TEXT sets the system prompt and begins anew, /quit leaves; Ctrl-C stops an answer"
INTERRUPTED = 130

SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "longest answer in tokens"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "share of the likeliest tokens to draw from"),
    "top_k": (int, "how many of the likeliest tokens to draw from"),
    "min_p": (float, "least probability, as a share of the likeliest token's"),
    "repetition_penalty": (float, "above 1: what was said is said less"),
    "presence_penalty": (float, "above 0: what was said is said less"),
    "frequency_penalty": (float, "above 0: what was said often is said less"),
    "seed": (int, "the same seed gives the same answer"),
}


def chat_parser() -> Parser:
    parser = _parser("chat", "Talk to a served model. " + HELP + ".")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    return parser


def complete_parser() -> Parser:
    parser = _parser("complete", "Continue a text.")
    parser.add_argument("prompt", nargs="?", default="-", help="the text; - or nothing: from standard input")
    return parser


def chat(words: list[str]) -> int:
    """Runs a conversation and returns the exit code; raises Failure in the server's words."""
    given = chat_parser().read(words)
    server = Server(given.url, given.api_key)
    body = _body(given, server)
    here = sys.stdin.isatty()
    if here:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` a history)
        print(f"{body['model']} at {server.url}. {HELP}.", file=sys.stderr)
    return Conversation(server, body, given.system or "", here).run()


def complete(words: list[str]) -> int:
    """Prints the continuation and returns the exit code; raises Failure in the server's words."""
    given = complete_parser().read(words)
    server = Server(given.url, given.api_key)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    try:
        _print(server.stream("completions", {**_body(given, server), "prompt": prompt}))
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class Conversation:
    """Turns of one chat, and the commands between them."""

    def __init__(self, server: Server, body: dict[str, Any], system: str, here: bool) -> None:
        self._server = server
        self._body = body
        self._system = system
        self._here = here
        self._turns: list[dict[str, str]] = []

    def run(self) -> int:
        while True:
            try:
                line = input("> " if self._here else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                return INTERRUPTED
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                self._turn(line)

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/reset":
                self._turns.clear()
            case "/system":
                self._system = rest.strip()
                self._turns.clear()
            case _:
                print(HELP, file=sys.stderr)

    def _turn(self, line: str) -> None:
        """A question and its answer; one that failed leaves no trace in what the model is told next."""
        turns = [*self._turns, {"role": "user", "content": line}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        said: list[str] = []
        try:
            thought = Thought(sys.stdout.isatty())
            pieces = self._server.stream("chat/completions", {**self._body, "messages": system + turns}, thought.tell)
            _print(thought.before(_kept(pieces, said)))
        except KeyboardInterrupt:
            print()
            if not self._here:
                raise
        except CliError as failure:
            if not self._here:
                raise
            print(f"{failure}", file=sys.stderr)
            return
        if said:
            self._turns = [*turns, {"role": "assistant", "content": "".join(said)}]


class Thought:
    """What a model thinks before it answers: dim on a terminal, and nowhere else."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._told = False

    def tell(self, text: str) -> None:
        if self._shown:
            print(f"\x1b[2m{text}\x1b[0m", end="", flush=True)
            self._told = True

    def before(self, pieces: Iterator[str]) -> Iterator[str]:
        """The answer, two lines below."""
        for piece in pieces:
            if piece and self._told:
                yield "\n\n"
                self._told = False
            yield piece


def _parser(name: str, about: str) -> Parser:
    parser = Parser(prog=f"sluice {name}", usage=f"sluice {name} [--flag value ...]", description=about)
    parser.add_argument("--url", default=URL, help=f"an OpenAI-compatible server [default {URL}]")
    parser.add_argument("--model", metavar="NAME", help="which of its models [default: the first]")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SLUICE_API_KEY", ""),
        help="what the server asks for, if it does [SLUICE_API_KEY]",
    )
    for field, (kind, help) in SAMPLING.items():
        shape = "N" if kind is int else "X"
        parser.add_argument("--" + field.replace("_", "-"), type=kind, metavar=shape, help=help)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    return parser


def _body(given: argparse.Namespace, server: Server) -> dict[str, Any]:
    """What was asked for and nothing else: the rest is the server's to choose."""
    asked = {field: getattr(given, field) for field in (*SAMPLING, "stop")}
    model = given.model or server.model()
    return {"model": model} | {field: value for field, value in asked.items() if value is not None}


def _kept(pieces: Iterator[str], said: list[str]) -> Iterator[str]:
    for piece in pieces:
        said.append(piece)
        yield piece


def _print(pieces: Iterator[str]) -> None:
    """Each piece at once, and a line's end after the last, also where it breaks off."""
    last = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            last = piece or last
    except CliError:
        if last:
            print(flush=True)
        raise
    if not last.endswith("\n"):
        print(flush=True)
