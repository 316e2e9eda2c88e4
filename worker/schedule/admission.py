"""Which sequences are taken in at all; everything else that is true of them is decided at planning."""

from shared.messages import Refusal
from worker.schedule.paging import Paging
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import Queue
from worker.schedule.sequence import Sequence


class Refused(Exception):
    """A sequence was not taken; `reason` and the text are what the client is told."""

    reason = Refusal.INVALID


class QueueFull(Refused):
    reason = Refusal.QUEUE_FULL


class TooLong(Refused):
    reason = Refusal.TOO_LONG


def check_possible(sequence: Sequence, config: SchedulerConfig, paging: Paging) -> None:
    """Raises Refused if the sequence could not be finished even with the worker to itself."""
    if sequence.prompt_len < 1 or sequence.output_len < 0:
        raise Refused("the prompt is empty")
    tokens = len(sequence.tokens)
    longest = sequence.prompt_len + sequence.sampling.max_tokens
    if max(longest, tokens) > config.max_seq_len:
        raise TooLong(f"prompt and max_tokens are {longest} tokens, at most {config.max_seq_len} are possible")
    if not paging.fits(max(longest - 1, tokens)):  # the last token's K/V is never needed
        raise TooLong(f"prompt and max_tokens are {longest} tokens, more than the K/V pool can hold")


RESERVE = 8  # one part in so many of the queue is kept for owners who have little or nothing in it


def check_room(sequence: Sequence, config: SchedulerConfig, queue: Queue, running: int) -> None:
    """Raises QueueFull if too many wait. Whoever finds nobody waiting and a free place is always taken."""
    waiting = len(queue)
    if waiting >= config.max_waiting_requests and (waiting or running >= config.max_batch_size):
        raise QueueFull(f"{waiting} requests are waiting, at most {config.max_waiting_requests} may")
    if waiting and 0 < config.max_waiting_tokens < queue.tokens + len(sequence.tokens):
        raise QueueFull(f"{queue.tokens} prompt tokens are waiting, at most {config.max_waiting_tokens} may")
    if sequence.tenant:
        _check_share(sequence, config, queue)


def _check_share(sequence: Sequence, config: SchedulerConfig, queue: Queue) -> None:
    """An owner may have seven times as much waiting as it leaves free for others, and one request in any case.

    So one alone can fill seven eighths of the queue, two nearly half of it each, and however many there are, the
    next one finds a place.
    """
    held, tokens = queue.turns.held(sequence.tenant)
    most = RESERVE - 1
    if held and held >= most * (config.max_waiting_requests - len(queue) - 1):
        raise QueueFull(f"{held} requests of {sequence.tenant} are waiting; the other places are kept for other keys")
    added = len(sequence.tokens)
    if held and config.max_waiting_tokens and tokens >= most * (config.max_waiting_tokens - queue.tokens - added):
        raise QueueFull(f"{tokens} prompt tokens of {sequence.tenant} are waiting; what is left is kept for other keys")
