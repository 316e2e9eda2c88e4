"""A loaded tower, with a cache of what it has encoded: chunks of a prompt and later requests encode nothing again."""

import time
from collections import OrderedDict
from ctypes import c_uint64
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.messages import Picture
from worker.kernels.operations import Operations
from worker.vision.encoder import Encoder, EncoderWeights
from worker.vision.rotary import components
from worker.vision.spec import VisionSpec


@dataclass(frozen=True, slots=True)
class Tower:
    """What is loaded of a checkpoint. weights: None if pictures are not served, for the reason `missing`."""

    spec: VisionSpec | None = None
    weights: EncoderWeights | None = None
    missing: str = "this model sees no pictures"


class Vision:
    """Encodes pictures. cache_bytes: vectors that stay in memory, the least recently used are dropped first."""

    def __init__(
        self,
        spec: VisionSpec,
        weights: EncoderWeights,
        operations: Operations,
        started: c_uint64,
        cache_bytes: int,
        rope_width: int = 0,
    ) -> None:
        """started: counts the layers of all pictures. rope_width: columns of the text model's rotary table."""
        self.components = None if spec.sections is None else torch.tensor(components(spec.sections, rope_width))
        self.spec = spec
        self.encoded = self.hits = 0  # pictures
        self.seconds = 0.0  # spent encoding
        self.cached_bytes = 0
        self._encoder = Encoder(spec, weights, operations, started)
        self._cache: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the most recently used last
        self._cache_bytes = cache_bytes

    def rows(self, picture: Picture) -> Tensor:
        """Returns the vectors of a picture, [tokens, text_size], from the cache or encoded now."""
        found = self._cache.get(picture.digest)
        if found is not None:
            self.hits += 1
            self._cache.move_to_end(picture.digest)
            return found
        began = time.perf_counter()
        rows = self._encoder.encode(picture)
        self.seconds += time.perf_counter() - began
        self.encoded += 1
        self._keep(picture.digest, rows)
        return rows

    def _keep(self, digest: bytes, rows: Tensor) -> None:
        if rows.nbytes > self._cache_bytes:
            return
        self._cache[digest] = rows
        self.cached_bytes += rows.nbytes
        while self.cached_bytes > self._cache_bytes:
            self.cached_bytes -= self._cache.popitem(last=False)[1].nbytes
