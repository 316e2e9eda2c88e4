"""`sluice chat` and `sluice complete` stream a server's answers to the terminal; its models, for `sluice models`.

Knows the terminal; http_client.py talks to the server. Ctrl-C stops an answer, or leaves the chat at its prompt. If the
input is a file or a pipe, the chat shows no prompts, and the first failure ends the command.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.launcher.child_command import CliError
from shared.config.flags import Parser
from shared.images import file_as_url

HELP = (
    "/image FILE shows an image with the next question, /reset starts over, /system TEXT sets the system prompt and "
    "starts over, /quit leaves; Ctrl-C stops an answer"
)
SAMPLED = "Sampling that no flag sets is what the model's authors recommend, or else the server's default"
INTERRUPTED = 130
CUT_OFF = "(The answer was cut off: it has reached --max-tokens or the end of the model's context.)"
TOO_LONG = "maximum context length"  # from OpenAI's error message, which compatible servers repeat word for word

SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "maximum length of the answer in tokens"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "sample from the most likely tokens of this total probability"),
    "top_k": (int, "sample from this many of the most likely tokens"),
    "min_p": (float, "minimum probability, as a fraction of the most likely token's"),
    "repetition_penalty": (float, "above 1: tokens that already occurred become less likely"),
    "presence_penalty": (float, "above 0: tokens of the answer become less likely"),
    "frequency_penalty": (float, "above 0: tokens become less likely each time they occur in the answer"),
    "seed": (int, "the same seed gives the same answer"),
}


def chat_parser() -> Parser:
    parser = _parser("chat", "Chat with a served model. " + HELP + ". " + SAMPLED + ".")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    return parser


def complete_parser() -> Parser:
    parser = _parser("complete", "Continue a text. " + SAMPLED + ".")
    parser.add_argument("prompt", nargs="?", default="-", help="the text; - or none: read standard input")
    return parser


def list_served(server: Server) -> int:
    """Prints a line for each model name of the server, and returns the exit code. Raises CliError if no answer comes.

    Servers that report no status or length get "-" there.
    """
    rows = [("NAME", "STATUS", "CONTEXT", "")]
    for model in server.model_rows():
        status = model.get("status")
        status = status if isinstance(status, dict) else {}
        reason = str(status.get("reason") or "")
        rows.append((str(model["id"]), str(status.get("value") or "-"), str(model.get("max_model_len") or "-"), reason))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print(shown("  ".join((*cells, row[3])).rstrip()))
    return 0


def chat(words: list[str]) -> int:
    """Runs a conversation and returns the exit code. Raises CliError with the server's message."""
    args = chat_parser().read(words)
    server = Server(args.url, args.api_key)
    body = _body(args, server)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` a history)
        print(shown(f"{body['model']} at {server.url}. {HELP}."), file=sys.stderr)
    return Conversation(server, body, args.system or "", interactive).run()


def complete(words: list[str]) -> int:
    """Prints the continuation and returns the exit code. Raises CliError with the server's message."""
    args = complete_parser().read(words)
    server = Server(args.url, args.api_key)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        _print(server.stream("completions", {**_body(args, server), "prompt": prompt}))
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class Conversation:
    """A chat: its messages, and the commands that the user types between them."""

    def __init__(self, server: Server, body: dict[str, Any], system: str, interactive: bool) -> None:
        self._server = server
        self._body = body
        self._system = system
        self._interactive = interactive
        self._messages: list[dict[str, Any]] = []
        self._images: list[str] = []  # URLs of the images for the next question

    def run(self) -> int:
        while True:
            try:
                line = input("> " if self._interactive else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                return INTERRUPTED
            if line in ("/quit", "/exit"):
                return 0
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                self._exchange(line)

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/image":
                self._show(rest.strip())
            case "/reset":
                self._messages.clear()
                self._images.clear()
            case "/system":
                self._system = rest.strip()
                self._messages.clear()
            case _:
                print(HELP, file=sys.stderr)

    def _show(self, file: str) -> None:
        try:
            self._images.append(file_as_url(Path(file)))
        except ValueError as problem:
            if not self._interactive:
                raise CliError(f"/image {file} {problem}", 1) from problem
            print(f"{file} {problem}", file=sys.stderr)

    def _content(self, line: str) -> Any:
        """Returns the content of the next message: a text, or a list of parts if it has images."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
        self._images = []
        return [*images, {"type": "text", "text": line}] if images else line

    def _exchange(self, line: str) -> None:
        """Sends a question and prints the answer; later requests leave out a failed exchange."""
        messages = [*self._messages, {"role": "user", "content": self._content(line)}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer: list[str] = []
        ends: list[str] = []
        try:
            reasoning = Reasoning(sys.stdout.isatty())
            pieces = self._server.stream(
                "chat/completions", {**self._body, "messages": system + messages}, reasoning.show, ends.append
            )
            _print(reasoning.before(_collect(pieces, answer)))
        except KeyboardInterrupt:
            print()
            if not self._interactive:
                raise
        except CliError as failure:
            if not self._interactive:
                raise
            hint = " /reset starts over." if TOO_LONG in str(failure) else ""
            print(shown(f"{failure}{hint}"), file=sys.stderr)
            return
        if self._interactive and "length" in ends:
            print(CUT_OFF, file=sys.stderr)
        if answer:
            self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


class Reasoning:
    """Shows a model's reasoning dimmed if the output is a terminal. Otherwise drops it."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._has_output = False

    def show(self, text: str) -> None:
        if self._enabled:
            print(f"\x1b[2m{shown(text)}\x1b[0m", end="", flush=True)
            self._has_output = True

    def before(self, pieces: Iterator[str]) -> Iterator[str]:
        """Puts a blank line between the reasoning and the answer."""
        for piece in pieces:
            if piece and self._has_output:
                yield "\n\n"
                self._has_output = False
            yield piece


def _server_parser(name: str, about: str) -> Parser:
    """Returns a parser with the flags that select the server."""
    parser = Parser(prog=f"sluice {name}", usage=f"sluice {name} [--flag value ...]", description=about)
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"address of an OpenAI-compatible server [default {DEFAULT_URL}]"
    )
    add_key(parser)
    return parser


def _parser(name: str, about: str) -> Parser:
    parser = _server_parser(name, about)
    parser.add_argument("--model", metavar="NAME", help="name of a served model [default: the first one]")
    for field, (kind, help) in SAMPLING.items():
        metavar = "N" if kind is int else "X"
        parser.add_argument("--" + field.replace("_", "-"), type=kind, metavar=metavar, help=help)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    return parser


def _body(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Returns a request body with the explicit parameters and those that the model's authors recommend for sampling.

    The server chooses all other parameters.
    """
    explicit = {field: getattr(args, field) for field in (*SAMPLING, "stop")}
    given = {field: value for field, value in explicit.items() if value is not None}
    try:
        rows = server.model_rows()
    except CliError:
        if not args.model:
            raise
        rows = []  # a server that lists no models may still serve the named model
    name = args.model or str(rows[0]["id"])
    return {"model": name} | _recommended(name, rows) | given


def _recommended(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sampling parameters that the authors of the model `name` recommend, if the server reports them."""
    found = next((row.get("recommended_sampling") for row in rows if row["id"] == name), None)
    return {field: found[field] for field in SAMPLING if field in found} if isinstance(found, dict) else {}


def _collect(pieces: Iterator[str], collected: list[str]) -> Iterator[str]:
    for piece in pieces:
        collected.append(piece)
        yield piece


def shown(text: str) -> str:
    """Returns a text of a server or a model as a terminal may get it: control characters, which could move the cursor,
    change the title or write to the clipboard, become visible signs."""
    return text.translate(SIGNS)


# control characters except tab and line break → their signs; those above ASCII, and those that turn the direction of
# text around, have none
SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}, 0x7F: "\u2421",
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd"),
}  # fmt: skip


def _print(pieces: Iterator[str]) -> None:
    """Prints each piece of text as it arrives, and ends the last line, even after a failure."""
    last, terminal = "", sys.stdout.isatty()
    try:
        for piece in pieces:
            print(shown(piece) if terminal else piece, end="", flush=True)
            last = piece or last
    except CliError:
        if last:
            print(flush=True)
        raise
    if not last.endswith("\n"):
        print(flush=True)
