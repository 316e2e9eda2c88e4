"""Prompts with images, in every format, have the ids, positions and pixels of transformers' processors."""

import asyncio
import base64
import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from frontend.api.anthropic import messages
from frontend.api.ollama.chat import CHAT as ollama_chat
from frontend.api.ollama.chat import GENERATE as ollama_generate
from frontend.api.openai import chat, responses
from frontend.chat import image_decoding
from frontend.chat import images as images_module
from frontend.errors import BadRequest, SluiceError
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.decoding import decode
from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.config.frontend import FrontendConfig
from tests.checkpoints import VOCAB
from tests.fakes import FakePool, sending
from tests.frontend.api.harness import parse
from tests.frontend.serving import http_client
from tests.image_processors import processor_of
from tests.images import PIXTRALS, POOLED, QWENS, SIDES, TILED, drawn, seeing_checkpoint
from tests.patience import PATIENCE_S
from tests.worker.vision.harness import GEMMA4S

MODEL = "seeing"
SIZES = [(90, 40), (30, 200), (64, 64)]
KINDS = [*TILED, "gemma3", *GEMMA4S, "lfm2_vl", *QWENS, *PIXTRALS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    return {kind: seeing_checkpoint(kind, root / kind) for kind in KINDS}


def context_of(folder: Path, **settings: Any) -> ModelContext:
    context = ModelContext.of((MODEL,), Tokenizer.load(folder), FrontendConfig(**settings))
    return replace(context, max_seq_len=4096)


def data(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{data(image)}"


def openai_part(image: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image), **more}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


async def asked(content: Any, context: ModelContext, **more: Any) -> GenerationRequest:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}], **more}
    return await parse(chat, body, context)


def patched(patches: NDArray[Any], rows: int, columns: int, side: int) -> NDArray[Any]:
    """Returns the image that patches make. patches [n, side * side * 3]: row by row; padding may follow them"""
    cut = patches[: rows * columns].reshape(rows, columns, side, side, 3)
    return cut.swapaxes(1, 2).reshape(side * rows, side * columns, 3)


def levels_of(kind: str, expected: Any) -> list[NDArray[Any]]:
    """Returns the pixels of each image that a processor has made, [height, width, 3]."""
    values = np.asarray(expected["pixel_values"])
    if kind == "lfm2_vl":
        shapes = np.asarray(expected["spatial_shapes"])
        return [patched(each, *shape, 4) for each, shape in zip(values, shapes, strict=True)]
    if kind in PIXTRALS:  # smaller images of a batch are padded
        sizes = np.asarray(expected["image_sizes"])
        return [
            np.moveaxis(each[:, :height, :width], 0, -1) for each, (height, width) in zip(values, sizes, strict=True)
        ]
    found: list[NDArray[Any]] = []
    if kind in GEMMA4S:
        side = 4 * POOLED[kind] if kind == "gemma4_unified" else 4
        for patches, places in zip(values, np.asarray(expected["image_position_ids"]), strict=True):
            columns, rows = places.max(0) + 1
            found.append(patched(patches, rows, columns, side))
        return found
    if kind not in QWENS:
        return list(np.moveaxis(values.reshape(-1, 3, SIDES[kind], SIDES[kind]), 1, -1))
    at = 0
    for _, rows, columns in np.asarray(expected["image_grid_thw"]):
        patches = values[at : at + rows * columns].reshape(rows // 2, columns // 2, 2, 2, 3, 4, 4)
        found.append(patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(4 * rows, 4 * columns, 3))
        at += rows * columns
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_ids_places_and_pixels_are_those_of_the_processor(
    folders: dict[str, Path], kind: str, count: int
) -> None:
    images = [drawn(*size, seed=seed) for seed, size in enumerate(SIZES[:count])]
    ours: list[Any] = [text("Look")]
    theirs: list[Any] = [text("Look")]
    for number, image in enumerate(images):
        ours += [openai_part(image), text(f"\nand {number}\n")]
        theirs += [{"type": "image"}, text(f"\nand {number}\n")]
    request = await asked(ours, context_of(folders[kind]))
    processor = processor_of(kind)
    prompt = processor.apply_chat_template([{"role": "user", "content": theirs}], add_generation_prompt=True)
    expected = processor(images=[images], text=[prompt], add_special_tokens=False, return_tensors="np")
    assert request.prompts[0] == list(expected["input_ids"][0])
    pixels = levels_of(kind, expected)
    found = list(request.features.images)
    if kind in TILED:  # images with fewer tiles are padded with black tiles
        pixels = pixels[: len(found)]
    assert len(found) == len(pixels) >= count
    vectors = 0
    for image, value in zip(found, pixels, strict=True):
        levels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        assert np.abs(levels.astype(float) - value).max() <= 1
        token = request.prompts[0][image.start]
        run = request.prompts[0][image.start : image.start + image.tokens]
        if kind in PIXTRALS:  # a row of tokens ends with a break token
            columns = run.index(next(id for id in run if id != token)) if set(run) != {token} else len(run)
            run = [id for place, id in enumerate(run, 1) if place % (columns + 1)]
        assert run == [token] * len(run)
        vectors += len(run)
    assert vectors == request.prompts[0].count(request.prompts[0][found[0].start])


async def test_every_format_sends_the_same_images(folders: dict[str, Path]) -> None:
    context, image = context_of(folders["idefics3"]), drawn(90, 40)
    wanted = await asked([openai_part(image), text("What?")], context)
    base = {"model": MODEL, "max_tokens": 4}
    source = {"type": "base64", "media_type": "image/png", "data": data(image)}
    anthropic = [{"type": "image", "source": source}, text("What?")]
    parts = [{"type": "input_image", "image_url": url(image)}, {"type": "input_text", "text": "What?"}]
    found = [
        await parse(messages, {**base, "messages": [{"role": "user", "content": anthropic}]}, context),
        await parse(responses, {"model": MODEL, "input": [{"role": "user", "content": parts}]}, context),
        await parse(
            ollama_chat,
            {"model": MODEL, "messages": [{"role": "user", "content": "What?", "images": [data(image)]}]},
            context,
        ),
    ]
    for request in found:
        assert isinstance(request, GenerationRequest)
        assert request.prompts == wanted.prompts and request.features.images == wanted.features.images


async def test_images_in_results_of_tools_are_seen(folders: dict[str, Path]) -> None:
    context, image = context_of(folders["gemma3"]), drawn(64, 64)
    source = {"type": "base64", "media_type": "image/png", "data": data(image)}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [text("a plot"), {"type": "image", "source": source}],
    }
    body = {
        "model": MODEL, "max_tokens": 4, "messages": [
            {"role": "user", "content": "Draw."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "draw", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }  # fmt: skip
    request = await parse(messages, body, context)
    assert len(request.features.images) == 1


async def test_low_detail_is_one_tile(folders: dict[str, Path]) -> None:
    context, image = context_of(folders["idefics3"]), drawn(300, 200)
    whole, low = [await asked([openai_part(image, detail=one)], context) for one in ("high", "low")]
    assert len(whole.features.images) > 1 == len(low.features.images)


@pytest.mark.parametrize("words", ["<image>", "<fake_token_around_image><global-img><image>"])
async def test_text_of_a_user_makes_no_image(folders: dict[str, Path], words: str) -> None:
    context, image = context_of(folders["idefics3"]), drawn(40, 40)
    request = await asked([text(words), openai_part(image), text(words)], context)
    shown = request.features.images
    assert len(shown) == 10  # nine tiles, and the whole image
    assert request.prompts[0].count(request.prompts[0][shown[0].start]) == sum(one.tokens for one in shown)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not base64": ({"url": "data:image/png;base64,%%%"}, "the image is not base64"),
    "no base64": ({"url": "data:image/png,abc"}, "must be a data: URL in base64"),
    "a text": ({"url": "data:text/plain;base64,aGk="}, "media type 'text/plain'"),
    "no image": ({"url": "data:image/png;base64,aGVsbG8="}, "the image is no PNG, JPEG, WebP or GIF"),
    "ftp": ({"url": "ftp://example.org/a.png"}, "must be a data:"),
    "web": ({"url": "https://example.org/a.png"}, "--allowed-media-domains"),
    "file": ({"url": "file:///etc/passwd"}, "--allowed-media-path"),
    "empty": ({"url": "data:image/png;base64,"}, "is empty"),
}


@pytest.mark.parametrize("name", BAD)
async def test_image_that_cannot_be_used_is_refused_in_words(folders: dict[str, Path], name: str) -> None:
    part, words = BAD[name]
    with pytest.raises(SluiceError, match=words) as raised:
        await asked([{"type": "image_url", "image_url": part}], context_of(folders["gemma3"]))
    assert raised.value.status == 400
    assert raised.value.param == "messages[0].content[0]" and str(raised.value).startswith("`messages[0].content[0]`: ")


async def test_refused_image_is_named_by_its_place_in_every_format(folders: dict[str, Path]) -> None:
    context, bad = context_of(folders["gemma3"]), base64.b64encode(b"hello").decode()
    good = {"type": "base64", "media_type": "image/png", "data": data(drawn(20, 20, seed=3))}
    said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bad}"}}
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": f"data:image/png;base64,{bad}"}]
    block = {"type": "image", "source": {**good, "data": bad}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("a"), block]}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "draw", "input": {}}]}
    call = {"type": "function_call", "call_id": "c", "name": "draw", "arguments": "{}"}
    shown = [{"type": "image", "source": good}, result, block]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (chat, {"messages": [*said, {"role": "user", "content": [text("x"), part]}]}, "messages[2].content[1]"),
        (responses, {"input": [*said, {"role": "user", "content": parts}]}, "input[2].content[1]"),
        (responses, {"input": [call, {"type": "function_call_output", "call_id": "c", "output": parts}]},
         "input[1].output[1]"),
        (messages, {"messages": [*said, {"role": "user", "content": [text("x"), block]}]}, "messages[2].content[1]"),
        (messages, {"messages": [said[0], use, {"role": "user", "content": shown}]},
         "messages[2].content[1].content[1]"),
        (ollama_chat, {"messages": [*said, {**said[0], "images": [good["data"], bad]}]}, "messages[2].images[1]"),
        (ollama_generate, {"prompt": "What?", "images": [bad]}, "images[0]"),
    ]  # fmt: skip
    for format, body, path in cases:
        with pytest.raises(SluiceError, match="the image is no PNG") as raised:
            await parse(format, {"model": MODEL, **({"max_tokens": 4} if format is messages else {}), **body}, context)
        assert (raised.value.param, str(raised.value).split(": ")[0]) == (path, f"`{path}`")


async def test_images_have_a_number_and_a_size(folders: dict[str, Path]) -> None:
    context = context_of(folders["gemma3"], max_images_per_request=2, max_image_pixels=2500)
    parts = [openai_part(drawn(50, 50, seed=seed)) for seed in range(3)]
    assert len((await asked(parts[:2], context)).features.images) == 2
    with pytest.raises(SluiceError, match=r"`messages\[0\].content\[2\]`: the request has 3 images; at most 2"):
        await asked(parts, context)
    with pytest.raises(SluiceError, match=r"content\[1\]`: the image has 51 x 50 pixels; at most 2500"):
        await asked([parts[0], openai_part(drawn(51, 50))], context)


async def test_files_are_read_below_the_allowed_folder_only(folders: dict[str, Path], tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    drawn(20, 20).save(inside / "a b.png")
    drawn(20, 20).save(outside)
    (inside / "link.png").symlink_to(outside)
    context = context_of(folders["gemma3"], allowed_media_path=str(inside))

    async def ask(path: str) -> GenerationRequest:
        return await asked([{"type": "image_url", "image_url": {"url": f"file://{path}"}}], context)

    assert len((await ask(f"{inside}/a%20b.png")).features.images) == 1
    for path in ("a%20b.png", "//a%20b.png"):  # spellings of a path by llama.cpp's clients
        assert len((await ask(path)).features.images) == 1
    (inside / "deep").mkdir()
    drawn(20, 20).save(inside / "deep" / "c.png")
    assert len((await ask("deep/c.png")).features.images) == 1
    for path in (outside, f"{inside}/../out.png", f"{inside}/link.png", f"{inside}/%2e%2e/out.png", "../out.png"):
        with pytest.raises(SluiceError, match="is not below the folder"):
            await ask(str(path))
    for path in (f"{inside}/none.png", str(inside)):
        with pytest.raises(SluiceError, match="is not there"):
            await ask(path)
    (inside / "circle.png").symlink_to("circle.png")
    for path in ("a%00b.png", f"{inside}/%00", "[b", f"{inside}/circle.png", f"{inside}/{'a/' * 3000}"):
        with pytest.raises(SluiceError, match="names no file") as refused:
            await ask(path)
        assert (refused.value.status, refused.value.param) == (400, "messages[0].content[0]")


async def test_model_without_sight_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "blind"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source := folders["gemma3"] / name).exists():
            (folder / name).write_bytes(source.read_bytes())
    with pytest.raises(SluiceError, match=r"`messages\[0\].content\[0\]`: .* sees no images") as raised:
        await asked([openai_part(drawn(20, 20))], context_of(folder))
    assert raised.value.status == 400


async def test_model_that_sees_is_listed_with_it_and_its_images_are_counted(folders: dict[str, Path]) -> None:
    part, bad = (
        openai_part(drawn(20, 20, seed=71)),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    )
    limits = m.Limits(max_seq_len=4096, vocab_size=VOCAB, eos_token_ids=())
    pool = FakePool(sending([104]), welcome=m.Welcome(1, 1, 4711, "tiny", "", limits))

    def body(*parts: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}]}

    async with http_client(pool, Tokenizer.load(folders["gemma3"])) as http:
        (listed,) = (await http.get("/v1/models")).json()["data"]
        assert "vision" in listed["capabilities"]
        before = await counted(http)
        tokens = (await http.post("/tokenize", json=body(part, part))).json()["count"]
        assert tokens > (await http.post("/tokenize", json=body(text("Hi")))).json()["count"] + 2 * 16
        assert (await http.post("/v1/chat/completions", json=body(bad))).status_code == 400
        after = await counted(http)
    (seconds, *one), (more, *other) = before, after
    assert [now - then for now, then in zip(other, one, strict=True)] == [1, 1] and more > seconds


async def test_images_that_take_long_hold_no_other_work_up(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, context = threading.Event(), context_of(folders["gemma3"], allowed_media_domains="example.org")

    def slow(*_: Any, **__: Any) -> Any:
        held.wait()
        raise BadRequest("slow")

    monkeypatch.setattr(images_module, "fetched", slow)
    monkeypatch.setattr(image_decoding.CHILDREN, "call_now", slow)
    web = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    slow_ones = [asyncio.ensure_future(asked([part], context)) for part in [openai_part(drawn(9, 9)), web] * 40]
    try:
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 5), PATIENCE_S) == 5
        assert not any(one.done() for one in slow_ones)
    finally:
        held.set()
        ends = await asyncio.gather(*slow_ones, return_exceptions=True)
    assert all(isinstance(end, BadRequest) for end in ends)


async def counted(http: httpx.AsyncClient) -> list[float]:
    """Returns three metrics of images: seconds of decoding, number of decoded images, number of refused ones."""
    names = ["picture_decode_seconds_total", 'pictures_total{outcome="decoded"}', 'pictures_total{outcome="refused"}']
    page = (await http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return [float(values[f"sluice_{name}"]) for name in names]


async def test_same_text_with_another_image_is_another_prompt(folders: dict[str, Path]) -> None:
    from frontend.api.receipts import prompt_hash

    context = context_of(folders["gemma3"])
    one, other = [await asked([openai_part(drawn(20, 20, seed=seed))], context) for seed in (0, 1)]
    assert one.prompts == other.prompts
    hashes = [prompt_hash(each.prompts[0], each.features.images) for each in (one, other)]
    assert hashes[0] != hashes[1] and hashes[0] != prompt_hash(one.prompts[0])


@pytest.mark.parametrize(
    "source", [{"type": "base64", "media_type": "image/png", "data": "x"}, {"type": "url", "url": "u"}]
)
def test_unknown_field_beside_an_image_is_ignored(source: dict[str, str]) -> None:
    block = {"type": "image", "source": {**source, "more": 1}, "unknown": None}
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    ignored: list[str] = []
    read = decode(json.dumps(body).encode(), messages.REQUEST, ignored.append)
    found: Any = read.messages[0].content[0]
    assert len(ignored) == 2 and found.source.url.endswith(source.get("data", "u"))


async def test_image_of_a_conversation_that_is_cut_is_fetched_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, fetches = context_of(folders["gemma3"], allowed_media_domains="example.org"), list[str]()
    file = base64.b64decode(data(drawn(64, 64)))

    def fetched(path: str, url: str, *_: Any) -> bytes:
        fetches.append(url)
        return file

    monkeypatch.setattr(images_module, "fetched", fetched)
    said = [{"role": "user", "content": f"{number}{'a' * 900}"} for number in range(8)]
    picture = {"type": "input_image", "image_url": "https://example.org/a.png"}
    items = [*said, {"role": "user", "content": [picture, {"type": "input_text", "text": "What?"}]}]
    body = {"model": MODEL, "max_output_tokens": 4, "truncation": "auto", "input": items}
    request = await parse(responses, body, context)
    assert len(request.features.images) == 1 and len(fetches) == 1
