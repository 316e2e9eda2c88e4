"""Makes the inputs of the checks before serving: a decoder with few layers, and sequences with their own K/V cache."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from shared.config import WorkerConfig
from shared.messages import Sampling
from worker.kernels.operations import Operations
from worker.kv_cache.tensors import KVCache, kv_format
from worker.model.decoder import Decoder
from worker.run.warmup import StepLimits
from worker.schedule.records.sequence_states import SequenceStates, slots_of
from worker.schedule.sequence import Chunk, Sequence


def first_layers(decoder: Decoder, length: int, operations: Operations, least: int = 1) -> Decoder:
    """Returns a decoder with only the first layer of each kind, and the layers whose K/V these layers share.

    Layers are of the same kind if their specs and the formats of their weights are equal. length: tokens of the longest
    sequence of the new decoder. least: the first `least` layers are always kept.
    """
    spec, weights = decoder.spec, decoder.weights
    kinds: dict[object, int] = {}
    for index, (kind, layer) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        kinds.setdefault((kind, *(linear.format for linear in layer.linears)), index)
    wanted = {*kinds.values(), *range(min(least, len(spec.layers)))}
    shared = {owner for index in wanted if (owner := spec.layers[index].shares) is not None}
    chosen = sorted(wanted | shared)
    layers = [spec.layers[index] for index in chosen]
    renumbered = (
        replace(layer, shares=None if layer.shares is None else chosen.index(layer.shares)) for layer in layers
    )
    small = Decoder(
        replace(spec, layers=tuple(renumbered)),
        replace(weights, layers=[weights.layers[index] for index in chosen]),
        length,
        operations,
    )
    small.exchange = decoder.exchange
    return small


def sequences_of(kinds: Iterable[tuple[int, Sampling]], limits: StepLimits, vocab: int) -> list[Sequence]:
    """Makes a sequence for each (length, sampling) in `kinds`. The limits may shorten sequences.

    The tokens are from the whole vocabulary. The first sequence gets the pages from page 1 on, the next one the pages
    after these; each sequence has its pages in descending order. Each sequence gets two slots for recurrent states,
    from slot 1 on.
    """
    sequences, page = list[Sequence](), 1
    for number, (most, sampling) in enumerate(kinds):
        tokens = [(7919 * (number + 3 * at) + 11) % vocab for at in range(min(most, limits.length))]
        count = -(-len(tokens) // limits.page_size)
        pages, page = array("i", reversed(range(page, page + count))), page + count
        own = [2 * number + 1, 2 * number + 2]
        sequences.append(
            Sequence(
                (b"", number), tokens, len(tokens), sampling, number, pages=[pages], states=SequenceStates(free=own)
            )
        )
    return sequences


def cache_for(sequences: Seq[Sequence], decoder: Decoder, worker: WorkerConfig, page_size: int) -> KVCache:
    """Makes a K/V cache with the pages and slots of these sequences."""
    embed = decoder.weights.embed
    pages = 1 + sum(len(sequence.pages[0]) for sequence in sequences)
    slots = 1 + sum(len(slots_of(sequence).free) for sequence in sequences)
    kv_dtype = kv_format(worker.kv_cache_dtype, embed.dtype)
    return KVCache(
        decoder.spec, (pages,), page_size, kv_dtype, embed.device, state_slots=slots, state_dtype=embed.dtype
    )


def advance(chunk: Chunk) -> None:
    """Counts the tokens of a chunk as computed. The slot that was written becomes the slot to read next."""
    sequence = chunk.sequence
    sequence.computed_tokens += chunk.length
    states = slots_of(sequence)
    written = states.free.pop()
    if chunk.start:
        states.free.append(states.at.pop(chunk.start))
    states.at[sequence.computed_tokens] = written
