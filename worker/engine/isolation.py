"""Splits steps, so that a sequence that makes a step fail or a worker crash harms no other sequence."""

from worker.schedule.sequence import Chunk


def isolate_suspects(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Splits a step so that each sequence that is suspected of having crashed a worker has a step of its own."""
    suspects = [[chunk] for chunk in chunks if chunk.sequence.history.crashes]
    others = [chunk for chunk in chunks if not chunk.sequence.history.crashes] if suspects else chunks
    return [others, *suspects] if others else suspects


def first_half(chunk: Chunk) -> Chunk | None:
    """Returns the first half of a chunk, to be retried alone; None if the chunk cannot be cut.

    The scheduler plans the second half in a later step.
    """
    half, pictures = chunk.length // 2, chunk.sequence.pictures
    if pictures is not None:
        half = pictures.uncut(chunk.start, half, most=chunk.length - 1)
    return Chunk(chunk.sequence, chunk.start, half, False) if half else None


def bisect(chunks: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
    """Splits a failed step in two: sequences that have already produced tokens, and new ones.

    If all sequences are old, or all are new, the step is split into halves.
    """
    proven = [chunk for chunk in chunks if _has_run(chunk)]
    if 0 < len(proven) < len(chunks):
        return proven, [chunk for chunk in chunks if not _has_run(chunk)]
    middle = len(chunks) // 2
    return chunks[:middle], chunks[middle:]


def _has_run(chunk: Chunk) -> bool:
    return chunk.start > 0 and chunk.sequence.output_len > 0
