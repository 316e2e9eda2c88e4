"""Forms are read piece by piece, within bounds."""

import threading
from collections.abc import AsyncIterator

import pytest

from frontend.errors import BadRequest, UnsupportedMediaType
from frontend.server import multipart
from frontend.server.multipart import MAX_HEADER_BYTES, MAX_HEADERS, MAX_PARTS, Part, boundary_of, parts


def part(name: str = "a", content: bytes = b"x", head: bytes = b"") -> bytes:
    return b'--xyzw\r\n%sContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (head, name.encode(), content)


async def read(form: bytes, size: int = 1 << 16) -> list[tuple[Part, bytes]]:
    """Returns the parts of a form that arrives in pieces of `size` bytes."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(form), size):
            yield form[at : at + size]

    found: list[tuple[Part, bytes]] = []
    async for one in parts(pieces(), b"xyzw"):
        if isinstance(one, Part):
            found.append((one, b""))
        else:
            found[-1] = (found[-1][0], found[-1][1] + one)
    return found


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 16])
async def test_names_and_bytes_are_the_senders(size: int) -> None:
    tricky = b"\r\n--xyz\r\n--\r\r\n-\r\n--xy"
    form = (
        part("ä\\", b"") + part("b", tricky, b"Content-Type: text/plain\r\nX: " + b"y" * 1000 + b"\r\n")
        + b'--xyzw  \r\ncontent-disposition: form-data; filename="c; \\"d\\".txt"; name=file\r\n\r\n'
        + tricky + b"\r\n--xyzw--\r\n--xyzw\r\nthis means nothing"
    )  # fmt: skip
    assert await read(form, size) == [
        (Part("ä\\", ""), b""), (Part("b", ""), tricky), (Part("file", 'c; "d".txt'), tricky),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        b"", b"--", b"text", b"--xyzw\r\n\r\nx\r\n--xyzw--", b"--wrong\r\n", part(), part() + b"--xyzw-",
        b'--xyzw\r\nContent-Disposition: attachment; name="a"\r\n\r\nx\r\n--xyzw--\r\n',
        b"--xyzw\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyzw--\r\n",
        b"--xyzw\r\nno header\r\n\r\nx\r\n--xyzw--\r\n",
        part() * (MAX_PARTS + 1) + b"--xyzw--\r\n",
        part(head=b"X: " + b"y" * MAX_HEADER_BYTES + b"\r\n") + b"--xyzw--\r\n",
        part(head=b"X: y\r\n" * MAX_HEADERS) + b"--xyzw--\r\n",
    ],
)  # fmt: skip
async def test_malformed_and_boundless_forms_are_refused(form: bytes) -> None:
    for size in (1, 1 << 16):
        with pytest.raises(BadRequest, match="the form is malformed"):
            await read(form, size)


def test_boundary_comes_from_the_content_type() -> None:
    assert boundary_of("multipart/form-data; boundary=xyzw") == b"xyzw"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="x y:z"') == b"x y:z"
    for kind in ("", "application/json", "multipart/mixed; boundary=x"):
        with pytest.raises(UnsupportedMediaType):
            boundary_of(kind)
    for kind in ("multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'x' * 71}"):
        with pytest.raises(BadRequest, match="names no boundary"):
            boundary_of(kind)


async def test_long_form_of_near_boundaries_is_read_in_threads_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[int] = []
    elsewhere: list[int] = []
    read_piece = multipart._Reader.read

    def noted(reader: multipart._Reader, data: bytes) -> list[Part | bytes]:
        (here if threading.current_thread() is threading.main_thread() else elsewhere).append(len(data))
        return read_piece(reader, data)

    monkeypatch.setattr(multipart._Reader, "read", noted)
    content = b"\r\n--xyzx" * 150_000
    assert await read(part("file", content) + b"--xyzw--", 1 << 20) == [(Part("file", ""), content)]
    assert sum(here) <= multipart.FEW_BYTES and sum(elsewhere) > 1_000_000
    assert max(elsewhere) <= multipart.READ_BYTES
