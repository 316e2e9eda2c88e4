"""A loaded tower, with a cache of what it has encoded: chunks of a prompt and later requests encode nothing again."""

import time
from collections import OrderedDict
from collections.abc import Container, Generator
from ctypes import c_uint64
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shared.messages import Picture
from worker.kernels.operations import Operations
from worker.vision.embedder import EmbedderWeights
from worker.vision.encoder import EncoderWeights
from worker.vision.rotary import components
from worker.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Tower:
    """The loaded tower of a checkpoint. weights: None if pictures are not served, for the reason `missing`."""

    spec: VisionSpec | None = None
    weights: EncoderWeights | EmbedderWeights | None = None
    missing: str = "this model sees no images"


class Vision:
    """Encodes pictures. cache_bytes: how many bytes of vectors stay in memory; the least recently used go first.

    Vectors of a picture that a sequence waits for (between_steps.py) stay until a step has read them, whatever the
    cache holds. `digest in vision` says whether a step would find a picture encoded.
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
        self.encoded = self.hits = 0  # numbers of pictures: encoded, and found in the cache
        self.seconds = 0.0  # time spent on encoding
        self.cached_bytes = 0
        self._encoder = weights.encoder(spec, operations, started)
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()  # digest → vectors, most recently used last
        self._cache_bytes = cache_bytes
        self._begun: tuple[bytes, Generator[int, None, Tensor]] | None = None  # a picture that is encoded in part
        self._unread: dict[bytes, Tensor] = {}  # pictures that were encoded between steps and no step has read yet

    def __contains__(self, digest: object) -> bool:
        return digest in self._unread or digest in self._cache

    def rows(self, picture: Picture) -> Tensor:
        """Returns the vectors of a picture, [tokens, text_size], from the cache or encoded now."""
        if (unread := self._unread.pop(picture.digest, None)) is not None:
            self._keep(picture.digest, unread)
            return unread
        if (found := self._cache.get(picture.digest)) is not None:
            self.hits += 1
            self._cache.move_to_end(picture.digest)
            return found
        while picture.digest not in self._unread:
            self.advance(picture, inf)
        return self.rows(picture)

    @torch.inference_mode()
    def advance(self, picture: Picture, most: float) -> None:
        """Encodes a picture further, by pieces of about `most` multiplications together, and at least by one piece.

        Drops another picture that is encoded in part. Passes on exceptions of the device, and then drops this picture.
        """
        if self._begun is None or self._begun[0] != picture.digest:
            self._begun = picture.digest, self._encoder.pieces(picture)
        pieces, began, done = self._begun[1], time.perf_counter(), 0
        try:
            while not done or done < most:
                done += next(pieces)
        except StopIteration as end:
            self._begun, self._unread[picture.digest] = None, end.value
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
