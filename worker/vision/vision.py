"""A loaded tower, with a cache of what it has encoded: chunks of a prompt and later requests encode nothing again."""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from ctypes import c_uint64
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor

from shared.images import MAX_PIXEL_BYTES, digest_among, image_digest
from shared.messages import PromptImage, Submit
from shared.prefix_identity import without_adapter
from worker.models.forward_inputs import ForwardInputs
from worker.operations import Operations
from worker.scheduler.prompt_images import PromptImages
from worker.scheduler.queue import QueueFull, Refused
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Chunk, Plan, Sequence
from worker.spec import ModelSpec
from worker.vision.attention import RotaryPositions, components
from worker.vision.encoder import EmbedderWeights, EncoderWeights
from worker.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Tower:
    """The loaded tower of a checkpoint. weights: None if images are not served, for the reason `missing`."""

    spec: VisionSpec | None = None
    weights: EncoderWeights | EmbedderWeights | None = None
    missing: str = "this model sees no images"


class Vision:
    """Encodes images. cache_bytes: how many bytes of vectors stay in memory; the least recently used go first.

    Vectors of an image that a sequence waits for stay until a step has read them, whatever the
    cache holds. `digest in vision` says whether a step would find an image encoded.
    """

    def __init__(
        self,
        spec: VisionSpec,
        weights: EncoderWeights | EmbedderWeights,
        operations: Operations,
        started: c_uint64,
        cache_bytes: int,
        rope_width: int = 0,
    ) -> None:
        """started: a counter of the layers that were computed. rope_width: columns of the text model's rotary table."""
        self.components = None
        if spec.sections is not None:
            columns = components(spec.sections, rope_width, alternate=spec.sections_alternate)
            self.components = torch.tensor(columns)
        self.spec = spec
        self.encoded = self.hits = 0  # numbers of images: encoded, and found in the cache
        self.seconds = 0.0  # time spent on encoding
        self.cached_bytes = 0
        self._encoder = weights.encoder(spec, operations, started)
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()  # digest → vectors, most recently used last
        self._cache_bytes = cache_bytes
        self._begun: tuple[bytes, Generator[int, None, Tensor]] | None = None  # an image that is encoded in part
        self._unread: dict[bytes, Tensor] = {}  # images that were encoded between steps and no step has read yet

    def __contains__(self, digest: object) -> bool:
        return digest in self._unread or digest in self._cache

    def is_begun(self, digest: bytes) -> bool:
        """Whether an image is encoded in part."""
        return self._begun is not None and self._begun[0] == digest

    def rows(self, image: PromptImage) -> Tensor:
        """Returns the vectors of an image, [tokens, text_size], from the cache or encoded now."""
        if (unread := self._unread.pop(image.digest, None)) is not None:
            self._keep(image.digest, unread)
            return unread
        if (found := self._cache.get(image.digest)) is not None:
            self.hits += 1
            self._cache.move_to_end(image.digest)
            return found
        while image.digest not in self._unread:
            self.advance(image, inf)
        return self.rows(image)

    @torch.inference_mode()
    def advance(self, image: PromptImage, most: float) -> None:
        """Encodes an image further, by pieces of about `most` multiplications together, and at least by one piece.

        Drops another image that is encoded in part. Passes on exceptions of the device, and then drops this image.
        """
        if self._begun is None or self._begun[0] != image.digest:
            self._begun = image.digest, self._encoder.pieces(image)
        pieces, began, done = self._begun[1], time.perf_counter(), 0
        try:
            while not done or done < most:
                done += next(pieces)
        except StopIteration as end:
            self._begun, self._unread[image.digest] = None, end.value
            self.encoded += 1
        except BaseException:
            self._begun = None
            raise
        finally:
            self.seconds += time.perf_counter() - began

    def forget_unread(self, waited_for: Container[bytes]) -> None:
        """Moves vectors that no sequence waits for any more into the cache, where they may be dropped."""
        for digest in [digest for digest in self._unread if digest not in waited_for]:
            self._keep(digest, self._unread.pop(digest))

    def _keep(self, digest: bytes, rows: Tensor) -> None:
        if rows.nbytes > self._cache_bytes:
            return
        self._cache[digest] = rows
        self.cached_bytes += rows.nbytes
        while self.cached_bytes > self._cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1].nbytes


# Encodes the images that running sequences wait for, some pieces between two steps.
#
# Encoding a large image takes seconds. If a step did it, all other streams would stop for that time. Therefore the
# planner computes a prompt only up to its first image that is not encoded, and the compute loop calls this module
# after each step. The module encodes pieces that together cost about as much as the prompt tokens that still fitted
# in the step, and at least one piece.


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """Encodes images between steps.

    token_cost: multiplications of the text model for one prompt token
    record_step: records the sequences that are to blame if the worker dies now
    publish: sends the results of the step before
    check_device: raises if the device is unusable
    fail: ends a sequence whose image could not be encoded
    turns: tenant → the number of its latest image; only of tenants that wait
    """

    vision: Vision
    scheduler: Scheduler
    token_cost: int
    record_step: Callable[[list[Sequence]], None]
    publish: Callable[[], None]
    check_device: Callable[[], None]
    fail: Callable[[Sequence, Exception], None]
    turns: dict[str, int] = field(default_factory=dict)

    def __call__(self, plan: Plan) -> bool:
        """Encodes some pieces of an image that a sequence waits for. Returns False if no sequence waits.

        An image that is begun is finished first. Then the tenants take turns, each with its oldest sequence.

        plan: the plan of the step before
        """
        seeing = [sequence for sequence in self.scheduler.state.running if sequence.images is not None]
        stops = [(sequence, stop) for sequence in seeing if (stop := _stop_of(sequence)) is not None]
        self.vision.forget_unread({image.digest for _, image in stops})
        waiting = [(sequence, image) for sequence, image in stops if image.digest not in self.vision]
        if not waiting:
            return False
        sequence, image = self._next(waiting)
        self.publish()
        in_flight = [other for other in self.scheduler.state.running if other.in_flight_tokens]
        self.record_step([sequence, *in_flight])
        self._encode(sequence, image, self._tokens_left(plan) * self.token_cost)
        return True

    def _next(self, waiting: list[tuple[Sequence, PromptImage]]) -> tuple[Sequence, PromptImage]:
        for one in waiting:
            if self.vision.is_begun(one[1].digest):
                return one
        latest = {one.turn.tenant: self.turns.get(one.turn.tenant, 0) for one, _ in waiting}
        chosen = min(waiting, key=lambda one: latest[one[0].turn.tenant])  # the first of equal ones
        latest[chosen[0].turn.tenant] = 1 + max(latest.values())
        self.turns.clear()
        self.turns.update(latest)
        return chosen

    def _encode(self, sequence: Sequence, image: PromptImage, most: int) -> None:
        try:
            self.vision.advance(image, most)
        except Exception as error:
            self.check_device()  # raises before the sequence is reported as failed
            self.fail(sequence, error)

    def _tokens_left(self, plan: Plan) -> int:
        """Returns how many more prompt tokens would have fitted in the step."""
        prompts = sum(chunk.length for chunk in plan.chunks if chunk.length > 1)
        if len(plan.chunks) == 0 or prompts == plan.tokens:  # no stream waits for its next token
            return self.scheduler.config.max_step_tokens - prompts
        return self.scheduler.status.prefill_budget.prompt_tokens - prompts


def _stop_of(sequence: Sequence) -> PromptImage | None:
    assert sequence.images is not None
    return sequence.images.at(sequence.computed_tokens + sequence.in_flight_tokens)


def token_cost(spec: ModelSpec) -> int:
    """Returns about how many multiplications the layers of a text model do for one token."""
    attention = spec.hidden_size * (spec.qkv_size + spec.heads * spec.head_dim)
    total = 0
    for layer in spec.layers:
        wide = layer.intermediate_size or spec.intermediate_size
        if layer.sparse and spec.experts is not None:
            wide = spec.experts.chosen * spec.experts.intermediate_size + spec.experts.shared_size
        total += attention + (3 if spec.gated else 2) * spec.hidden_size * wide
    return total


# Checks the images of a request when it arrives, so that no frontend can harm the worker. Encodes nothing.

MAX_HELD_BYTES = 2 << 30  # limit on the pixels of all live sequences; a sequence keeps its pixels until it ends


@dataclass(frozen=True, slots=True)
class ImageAdmission:
    """Gives sequences their images, or refuses them.

    live: returns the sequences that hold pixels
    encoded: if images are encoded between steps, the digests of the images that are encoded already
    """

    tower: Tower
    live: Callable[[], Iterable[Sequence]]
    encoded: Container[bytes] | None = None

    def __call__(self, sequence: Sequence, submit: Submit) -> None:
        """Gives a sequence the images of its request. Raises Refused with the reason if they cannot be encoded.

        Equal images of requests that may share prefixes share their pixels and what is encoded of them; without this
        limit, the time of a request would tell whether another tenant has sent its image. Raises QueueFull if all
        requests together would hold too many pixels. A request that comes from a worker that was lost had been admitted
        there, and is always admitted again.
        """
        images = submit.images or []
        if problem := check_images(images, sequence.tokens[: sequence.prompt_len], self.tower):
            raise Refused(f"`prompt`: {problem}")
        images = [_among(one, without_adapter(submit.cache_salt)) for one in images]
        others = (other.images.images for other in self.live() if other.images is not None)
        held = {one.digest: one.pixels for each in others for one in each}
        images = [replace(one, pixels=held.setdefault(one.digest, one.pixels)) for one in images]
        if sum(map(len, held.values())) > MAX_HELD_BYTES and not submit.crashes:
            raise QueueFull(f"the images of all requests have more than {MAX_HELD_BYTES >> 30} GiB of pixels")
        assert self.tower.spec is not None
        give(sequence, images, self.tower.spec, self.encoded)


def give(
    sequence: Sequence, images: list[PromptImage], spec: VisionSpec, encoded: Container[bytes] | None = None
) -> None:
    """Gives a sequence images that were checked. encoded: see ImageAdmission"""
    rotary = None
    if spec.sections is not None:
        squares = [spec.squares_of(image.height, image.width) for image in images]
        rotary = RotaryPositions([image.start for image in images], squares)
    sequence.images = PromptImages(images, whole=spec.bidirectional, rotary=rotary, encoded=encoded)
    sequence.prefix.mark = sequence.images.places.mark


def _among(image: PromptImage, sharers: str) -> PromptImage:
    """Returns the image as the caches know it for those who share it."""
    return replace(image, digest=digest_among(image.digest, sharers)) if sharers else image


def check_images(images: list[PromptImage], prompt: list[int], tower: Tower) -> str:
    """Returns the first problem of the images of a prompt, or ""."""
    spec = tower.spec
    if spec is None:
        return tower.missing
    if sum(len(image.pixels) for image in images) > MAX_PIXEL_BYTES:
        return f"the images of the request have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels"
    for index, image in enumerate(images):
        if problem := _problem(image, prompt, spec):
            return f"image {index}: {problem}"
    if any(before.start + before.tokens > after.start for before, after in pairwise(images)):
        return "the images are not in the order of their tokens"
    return ""


def _problem(image: PromptImage, prompt: list[int], spec: VisionSpec) -> str:
    if problem := spec.size_problem(image.height, image.width):
        return f"it has {image.height} x {image.width} pixels; {problem}"
    if len(image.pixels) != 3 * image.height * image.width:
        return f"it has {len(image.pixels)} bytes of pixels, not {3 * image.height * image.width}"
    if image.tokens != (tokens := spec.tokens_of(image.height, image.width)):
        return f"it has {image.tokens} tokens; this model makes {tokens} of it"
    end = image.start + image.tokens
    if image.start < 0 or end > len(prompt):
        return "its tokens are not in the prompt"
    places = spec.places_of(image.height, image.width) + image.start
    if any(prompt[place] != spec.placeholder for place in places):
        return f"its tokens are not all the placeholder {spec.placeholder}"
    if len(places) + prompt[image.start : end].count(spec.placeholder) != 2 * len(places):
        return f"the token between two of its rows is the placeholder {spec.placeholder}"
    if image.digest != image_digest(image.height, image.width, image.pixels):
        return "its digest is not that of its pixels"
    return ""


# Metrics of images: how many were encoded, how many seconds that took, and how many were found in the cache.


class VisionCollector:
    """Makes the metrics at each scrape."""

    def __init__(self, prefix: str, vision: Vision) -> None:
        self._prefix, self._vision = prefix, vision

    def collect(self) -> Iterator[Metric]:
        prefix, vision = self._prefix, self._vision
        yield CounterMetricFamily(prefix + "pictures_encoded", "Images and tiles encoded.", value=vision.encoded)
        yield CounterMetricFamily(
            prefix + "picture_encode_seconds", "Time spent encoding images.", value=vision.seconds
        )
        yield CounterMetricFamily(
            prefix + "encoder_cache_hits", "Images and tiles that a step found encoded.", value=vision.hits
        )
        yield GaugeMetricFamily(
            prefix + "encoder_cache_bytes", "Size of the encoded images in memory.", value=vision.cached_bytes
        )


# The rows of a step that images replace. A chunk may begin or end within an image.


def with_image_embeddings(inputs: ForwardInputs, chunks: Seq[Chunk], vision: Vision) -> ForwardInputs:
    """Returns the inputs with the vectors of the placeholder tokens in these chunks. Encodes what is not cached."""
    indices, vectors = [], []
    bidirectional_end = (inputs.positions + 1).int() if vision.spec.bidirectional else None
    begins = accumulate((chunk.length for chunk in chunks), initial=0)
    for begin, chunk in zip(begins, chunks, strict=False):
        for places, end, rows in _vectors_of(chunk, vision):
            own = begin + places
            indices.append(own)
            vectors.append(rows)
            if bidirectional_end is not None:
                bidirectional_end[own] = end
    if vision.components is not None:
        inputs = _rotated(inputs, chunks, vision.components)
    if not indices:
        return inputs
    joined = torch.cat(vectors)
    embedded, *more = joined.view(len(joined), -1, vision.spec.text_size).unbind(1)
    replaced = torch.cat(indices).to(inputs.token_ids.device), embedded.contiguous()
    if vision.spec.stands_in is not None:
        inputs = dataclasses.replace(
            inputs, token_ids=inputs.token_ids.index_fill(0, replaced[0], vision.spec.stands_in)
        )
    return dataclasses.replace(
        inputs, replaced=replaced, bidirectional_end=bidirectional_end, added=tuple(part.contiguous() for part in more)
    )


def _rotated(inputs: ForwardInputs, chunks: Seq[Chunk], components: Tensor) -> ForwardInputs:
    """Returns the inputs with the three positions of each row. components: see attention.py"""
    positions = np.concatenate([_positions_of(chunk) for chunk in chunks], axis=1)
    device = inputs.positions.device
    columns = torch.from_numpy(positions)[components].T.contiguous()  # [T, D]
    return dataclasses.replace(inputs, rotary=columns.to(device), rope_rows=torch.arange(len(columns), device=device))


def _positions_of(chunk: Chunk) -> NDArray[np.int64]:
    end, images = chunk.start + chunk.length, chunk.sequence.images
    if images is None or images.rotary is None:
        return np.tile(np.arange(chunk.start, end), (3, 1))
    found: NDArray[np.int64] = images.rotary.between(chunk.start, end)
    return found


def _vectors_of(chunk: Chunk, vision: Vision) -> list[tuple[Tensor, int, Tensor]]:
    """Returns a tuple for each image that has tokens in a chunk.

    A tuple has the rows of the chunk that the image's vectors replace, the position after the image's last token,
    and these vectors.
    """
    if chunk.sequence.images is None:
        return []
    end, found = chunk.start + chunk.length, []
    for image in chunk.sequence.images.within(chunk.start, end):
        after = image.start + image.tokens
        first, last = max(chunk.start, image.start), min(end, after)
        places = vision.spec.places_of(image.height, image.width) + image.start
        begin, stop = np.searchsorted(places, (first, last))
        if begin < stop:  # else the chunk has only a token between two rows of the image
            rows = vision.rows(image)[begin:stop]
            found.append((torch.from_numpy(places[begin:stop] - chunk.start), after, rows))
    return found
