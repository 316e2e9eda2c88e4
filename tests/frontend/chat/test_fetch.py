"""Images from the web come only from allowed hosts, with limits on size and time."""

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.chat import images
from frontend.chat.images import fetched
from frontend.errors import BadRequest

HERE = "127.0.0.1"
MOST = 1 << 20
BEGINS = {
    "slow-head": b"HTTP/1.1 200 OK\r\nX: ",
    "slow-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
    "100": b"",
}


class Host(http.server.BaseHTTPRequestHandler):
    """Serves /N (N bytes), /moved, /none, /chunks, /slow (a byte every 20 ms), /cut and /headers.

    /slow-head and /slow-chunk send a header and a chunk's extension at that pace; /100 sends "100 Continue" responses.
    """

    protocol_version = "HTTP/1.1"
    timeout = 5
    asked: list[tuple[str, str | None]]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Host"]))
        what = self.path.partition("?")[0][1:]
        if what in BEGINS:
            self.wfile.write(BEGINS[what])
            self.close_connection = True
            return self._drip(b"HTTP/1.1 100 Continue\r\n\r\n" if what == "100" else b"x")
        if what == "moved":
            self.send_response(302)
            self.send_header("Location", f"http://{HERE}/5")
        elif what == "none":
            self.send_response(404)
        else:
            self.send_response(200)
        if what == "headers":
            for number in range(300):
                self.send_header(f"X-{number}", "a")
        if what == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
        elif what != "slow":
            self.send_header("Content-Length", what if what.isdigit() else "9" if what == "cut" else "0")
        self.end_headers()
        if what == "chunks":
            self.wfile.write(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        elif what == "cut":
            self.wfile.write(b"x")
            self.close_connection = True
        elif what == "slow":
            self._drip(b"x")
        elif what.isdigit():
            self.wfile.write(b"x" * int(what))

    def _drip(self, piece: bytes) -> None:
        try:
            for _ in range(500):
                self.wfile.write(piece)
                time.sleep(0.02)
        except OSError:
            pass  # the client has left


@pytest.fixture
def port() -> Iterator[int]:
    Host.asked = []
    with http.server.ThreadingHTTPServer((HERE, 0), Host) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_image_is_fetched_from_an_address_that_is_listed(port: int) -> None:
    assert fetched("image 1", f"http://{HERE}:{port}/7?a=b#c", [f"{HERE}:{port}"], MOST) == b"x" * 7
    assert len(fetched("image 1", f"HTTP://{HERE}:{port}/{MOST}", ["example.org", f"{HERE}:{port}"], MOST)) == MOST
    assert fetched("image 1", f"http://{HERE}:{port}/chunks", [f"{HERE}:{port}"], MOST) == b"abcdefg"
    assert Host.asked[:2] == [("/7?a=b", f"{HERE}:{port}"), (f"/{MOST}", f"{HERE}:{port}")]


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "nothing allowed": ("http://127.0.0.1:PORT/7", [], "the server fetches none"),
    "another host": ("http://127.0.0.1:PORT/7", ["example.org"], "none of the hosts"),
    "a host as a user": ("http://example.org@127.0.0.1:PORT/7", ["example.org"], "none of the hosts"),
    "another spelling": ("http://2130706433:PORT/7", [f"{HERE}:PORT"], "none of the hosts"),
    "a name of a private address": ("http://localhost:PORT/7", ["localhost:PORT"], "one of a private network"),
    "a port that is not of the web": (
        "http://127.0.0.1:PORT/7",
        [HERE],
        "with the port PORT, which is none",
    ),
    "another port": ("http://127.0.0.1:22/7", [f"{HERE}:PORT"], "with the port 22, which is none of the hosts"),
    "the port of the web": ("http://127.0.0.1/7", [f"{HERE}:PORT"], "is on '127.0.0.1', which is none of the hosts"),
    "no port": ("http://127.0.0.1:99999/7", [HERE], "has a URL that cannot be read"),
    "a line break": ("http://127.0.0.1:PORT/7\r\nX: y", [f"{HERE}:PORT"], "letters that must be escaped"),
    "too large": (f"http://127.0.0.1:PORT/{MOST + 1}", [f"{HERE}:PORT"], "has more than 1 MiB"),
    "moved": ("http://127.0.0.1:PORT/moved", [f"{HERE}:PORT"], "answers 302, and redirects are not followed"),
    "not there": ("http://127.0.0.1:PORT/none", [f"{HERE}:PORT"], "answers 404"),
    "cut": ("http://127.0.0.1:PORT/cut", [f"{HERE}:PORT"], "its host sends 1 of 9 bytes"),
    "many headers": ("http://127.0.0.1:PORT/headers", [f"{HERE}:PORT"], "cannot be fetched from 127.0.0.1"),
    "not TLS": ("https://127.0.0.1:PORT/7", [f"{HERE}:PORT"], "cannot be fetched from 127.0.0.1"),
    "nobody there": ("http://127.0.0.1:9/7", [f"{HERE}:9"], "cannot be fetched from 127.0.0.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fetched_is_refused_in_words(port: int, name: str) -> None:
    url, allowed, words = REFUSED[name]
    url, words, *allowed = (text.replace("PORT", str(port)) for text in (url, words, *allowed))
    with pytest.raises(BadRequest, match=words) as raised:
        fetched("image 3", url, allowed, MOST)
    assert "image 3" in str(raised.value)


@pytest.mark.parametrize("what", ["slow", *BEGINS])
def test_host_that_sends_byte_by_byte_ends_the_request(port: int, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(images, "ALL_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(BadRequest, match=r"takes longer than|timed out"):
        fetched("image 1", f"http://{HERE}:{port}/{what}", [f"{HERE}:{port}"], MOST)
    assert time.monotonic() - begun < 5


def test_every_address_of_a_name_is_checked(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (address, port)) for address in ("93.184.216.34", "::ffff:10.0.0.1")]

    monkeypatch.setattr(images.socket, "getaddrinfo", two)
    with pytest.raises(BadRequest, match="one of a private network"):
        fetched("image 1", "http://example.org/a.png", ["example.org"], MOST)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "240.0.0.1", "0.0.0.0", "192.0.2.1",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:93.184.216.34",
        "::10.0.0.1",
        "64:ff9b::a00:1", "64:ff9b::5db8:d822", "64:ff9b:1::1", "2002:a00:1::1", "2001:0:a00:1::1",
        "2001:db8::1",
    ],
)  # fmt: skip
def test_name_that_leads_out_of_the_public_internet_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not images.is_public(address)
    monkeypatch.setattr(images.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (address, 0))])
    with pytest.raises(BadRequest, match="one of a private network"):
        fetched("image 1", "https://example.org/a.png", ["example.org"], MOST)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_address_may_be_fetched_from(address: str) -> None:
    assert images.is_public(address)
