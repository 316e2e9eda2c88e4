"""Reading GGUF files: values, places of tensors, split files; truncated, foreign and mismatched files are refused."""

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench.peers.gguf_file import add_metadata, finish
from shared.gguf.container import MOST_ENTRIES, MOST_KEYS, MOST_TENSORS, Container
from shared.gguf.naming import GgufError

METADATA = {"general.name": "tiny", "tokenizer.ggml.tokens": ["a", "Ġb", "ü"], "tokenizer.ggml.scores": [0.5, -1.5],
            "x.count": 7, "x.flag": True}  # fmt: skip
PADDING = 28  # bytes after the last tensor
WEIGHT = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(path: Path, **more: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    add_metadata(writer, METADATA | more)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("w", WEIGHT)
    writer.add_tensor(
        "q", gguf.quants.quantize(WEIGHT, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    finish(writer)
    return path


def test_values_and_places_of_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    container = Container.read([path])
    assert container.name == "a.gguf" and container.text("general.architecture") == "llama"
    assert {key: container.metadata[key] for key in METADATA} == METADATA
    assert container.number("llama.attention.layer_norm_rms_epsilon") == 1e-6, "the shortest decimal of the float32"
    stored = container.tensors["w"]
    assert (stored.type, stored.shape, stored.nbytes) == ("F32", (2, 32), 256)
    assert stored.floats() == WEIGHT.flatten().tolist()
    assert (container.tensors["q"].type, container.tensors["q"].shape, container.tensors["q"].nbytes) == (
        "Q8_0",
        (2, 32),
        68,
    )


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda c: c.integer("x.none"), "has no x.none"),
        (lambda c: c.integer("general.name"), "general.name must be a whole number, not 'tiny'"),
        (lambda c: c.integer("x.flag"), "x.flag must be a whole number"),
        (lambda c: c.flag("x.count"), "x.count must be true or false"),
        (lambda c: c.entries("x.count", int), "x.count must be a list"),
        (lambda c: c.entries("tokenizer.ggml.tokens", int), "tokenizer.ggml.tokens holds values of a wrong type"),
    ],
)
def test_missing_or_foreign_value_is_named(read: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=f"^a.gguf:? ?{words}"):
        read(Container.read([write(tmp_path / "a.gguf")]))


def test_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, draw = write(tmp_path / "a.gguf"), random.Random(3)
    data = path.read_bytes()
    for length in [
        0,
        3,
        4,
        8,
        23,
        24,
        len(data) - PADDING - 1,
        len(data) - 60,
        *draw.sample(range(25, len(data) - 60), 60),
    ]:
        path.write_bytes(data[:length])
        with pytest.raises(GgufError, match=r"a.gguf is not a (complete )?GGUF file") as caught:
            Container.read([path])
        assert "\n" not in str(caught.value)


def test_file_with_any_changed_byte_of_its_header_never_fails_otherwise(tmp_path: Path) -> None:
    path, draw = write(tmp_path / "a.gguf"), random.Random(4)
    data = path.read_bytes()
    for _ in range(200):
        broken = bytearray(data)
        broken[draw.randrange(len(data) - 400)] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            Container.read([path])
        except GgufError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"LLLL", "is not a GGUF file"),
        (4, struct.pack("<I", 99), r"is not a valid GGUF file \(.*version 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (
            8,
            struct.pack("<Q", 1 << 60),
            r"is not a valid GGUF file \(its header has 1152921504606846976 tensors, and may",
        ),
    ],
)
def test_foreign_header_is_refused(at: int, value: bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(GgufError, match=words):
        Container.read([path])


def with_entry(data: bytes, name: bytes, sizes: list[int], type: int, offset: int) -> bytes:
    """Returns the file with another shape (two sizes, columns first), type and offset of a tensor."""
    at = data.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    entry = struct.pack("<IQQIQ", 2, *sizes, type, offset)
    return data[:at] + entry + data[at + len(entry) :]


@pytest.mark.parametrize(
    ("sizes", "type", "offset", "words"),
    [
        ([32, 2], 0, 1 << 40, r"not a complete GGUF file \(it ends after \d+ bytes, but tensor q after 109\d+\)"),
        ([32, 2], 0, (1 << 64) - 64, "not a complete GGUF file .*tensor q after 1844674407"),
        ([1 << 32, 1 << 32], 0, 256, "not a complete GGUF file .*tensor q after"),
        ([32, 2], 8, 257, r"not a valid GGUF file \(tensor q begins at byte"),
        ([32, 2], 8, 224, r"not a valid GGUF file \(its tensors w and q overlap\)"),
        ([32, 2], 8, 0, r"not a valid GGUF file \(its tensors q and w overlap\)"),
        ([31, 2], 8, 256, r"not a valid GGUF file \(tensor q has rows of 31 numbers, no whole blocks of Q8_0\)"),
    ],
)
def test_tensor_whose_place_is_wrong_is_named(
    sizes: list[int], type: int, offset: int, words: str, tmp_path: Path
) -> None:
    """Numbers of 64 bits would wrap around, and tensors that overlap would be read as if nothing were wrong."""
    path = write(tmp_path / "a.gguf")
    path.write_bytes(with_entry(path.read_bytes(), b"q", sizes, type, offset))
    with pytest.raises(GgufError, match=rf"a\.gguf is {words}"):
        Container.read([path])


def test_two_tensors_of_one_name_are_refused_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = path.read_bytes()
    entry, name = struct.pack("<Q", 1), b"\n"
    for one in (b"w", b"q"):
        data = data.replace(entry + one + struct.pack("<I", 2), entry + name + struct.pack("<I", 2))
    path.write_bytes(data)
    with pytest.raises(GgufError, match=r"a\.gguf is not a valid GGUF file \(it has two tensors \\n\)$"):
        Container.read([path])


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int, keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            header(0, MOST_KEYS + 1, b"".join(text(b"%d" % n) + b"\7\0\0\0\1" for n in range(9000))),
            "8193 keys, and may have at most 8192",
        ),
        (
            header(MOST_TENSORS + 1, 0, struct.pack("<QBIQIQ", 1, 97, 1, 0, 0, 0) * 33_000),
            "32769 tensors, and",
        ),
        (
            header(1, 0, text(b"t") + struct.pack("<I", 100_000) + struct.pack("<Q", 3) * 100_000 + bytes(44)),
            "100000 axes of the tensor t, and",
        ),
        (
            header(0, 1, text(b"x") + struct.pack("<IIQ", 9, 0, MOST_ENTRIES + 1) + bytes(5 << 20)),
            "4194305 entries in its lists, and",
        ),
        (
            header(0, 2, (text(b"x") + struct.pack("<IIQ", 9, 8, 3 << 20) + bytes(24 << 20)) * 2),
            "6291456 entries in its lists, and",
        ),
    ],
)
def test_header_that_would_take_many_times_its_size_is_refused_before_it_is_read(
    data: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=rf"a\.gguf is not a valid GGUF file \(its header has {words}"):
        Container.read([path])


@pytest.mark.parametrize("name", ["general.name", "tokenizer.ggml.tokens", "x.numbers"])
def test_header_has_a_limit_on_its_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long: dict[str, Any] = {"general.name": "a" * 5000, "tokenizer.ggml.tokens": ["a" * 5000], "x.numbers": [1] * 5000}
    path = write(tmp_path / "a.gguf", **{name: long[name]})
    Container.read([path])
    monkeypatch.setattr("shared.gguf.container.MOST_HEADER_BYTES", 4096)
    with pytest.raises(GgufError, match=r"its header has \d+ bytes, and may have at most 4096"):
        Container.read([path])


def test_array_of_arrays_is_refused_in_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", **{"x.list": [1, 2]})
    data = path.read_bytes()
    at = data.index(b"x.list") + len(b"x.list") + 4
    path.write_bytes(data[:at] + struct.pack("<I", gguf.GGUFValueType.ARRAY) + data[at + 4 :])
    with pytest.raises(GgufError, match="it has an array of arrays"):
        Container.read([path])


@pytest.mark.parametrize(
    ("number", "name"),
    [(144, "IQ4_KS of ik_llama.cpp"), (139, "IQ4_K of ik_llama.cpp"), (99, "number 99, which is unknown")],
)
def test_type_that_only_a_fork_knows_is_refused_by_its_name(number: int, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<QI", 2, gguf.GGMLQuantizationType.Q8_0))  # the last dimension, then the type
    data[at + 8 : at + 12] = struct.pack("<I", number)
    path.write_bytes(data)
    with pytest.raises(GgufError, match=rf"a.gguf: tensor q is stored as type {name}; supported are") as caught:
        Container.read([path])
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf_8_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.gguf", **{"general.description": "caf#, ü", "general.tags": ["x", "caf#"]})
    path.write_bytes(path.read_bytes().replace(b"caf#", b"caf\xe9"))
    container = Container.read([path])
    assert container.metadata["general.description"] == "caf\ufffd, ü"
    assert container.metadata["general.tags"] == ["x", "caf\ufffd"]
    assert {key: container.metadata[key] for key in METADATA} == METADATA and container.tensors["w"].shape == (2, 32)
    for name in ("general.description", "general.tags"):
        assert f"a.gguf: {name} has bytes that are not UTF-8" in caplog.text


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ("Ġb".encode(), "tokenizer.ggml.tokens has a text that is not UTF-8"),
        (b"x.count", "has a name that is not UTF-8"),
    ],
)
def test_token_or_name_that_is_not_utf_8_is_refused_for_what_it_is(tmp_path: Path, right: bytes, words: str) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes().replace(right, b"\xff" + right[1:]))
    with pytest.raises(GgufError, match=words):
        Container.read([path])


def test_text_that_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    at = data.index("Ġb".encode()) - 8
    data[at : at + 8] = struct.pack("<Q", 1 << 40)
    path.write_bytes(data)
    with pytest.raises(GgufError, match=r"is not a complete GGUF file \(it ends after \d+ bytes\)"):
        Container.read([path])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"none\.gguf cannot be read: No such file"):
        Container.read([tmp_path / "none.gguf"])


def split(folder: Path) -> list[Path]:
    paths = [folder / f"a-{n:05}-of-00002.gguf" for n in (1, 2)]
    for n, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), "llama")
        writer.add_uint16("split.no", n)
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"w{n}", WEIGHT + n)
        finish(writer)
    return paths


def test_split_files_are_read_as_one(tmp_path: Path) -> None:
    paths = split(tmp_path)
    container = Container.read(paths)
    assert [container.tensors[name].file for name in ("w0", "w1")] == paths
    assert container.tensors["w1"].floats() == (WEIGHT + 1).flatten().tolist()


def test_tensors_of_a_link_are_in_the_file_of_that_name(tmp_path: Path) -> None:
    """The hub's cache has a link with the file's name to a file whose name is a hash."""
    link = tmp_path / "a.gguf"
    link.symlink_to(write(tmp_path / "0123abc"))
    assert {tensor.file for tensor in Container.read([link]).tensors.values()} == {link}


def test_split_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    first, second = split(tmp_path)
    with pytest.raises(GgufError, match="is one of 2 files, but 1 are there"):
        Container.read([first])
    for count in (float("nan"), [2], "2"):
        with pytest.raises(GgufError, match=r"split\.count must be a whole number"):
            Container.read([write(tmp_path / "other.gguf", **{"split.count": count})])
    with pytest.raises(GgufError, match="does not belong to"):
        Container.read([first, first])
    with pytest.raises(GgufError, match="does not belong to"):
        Container.read([first, write(tmp_path / "other.gguf")])
    assert second.exists()
