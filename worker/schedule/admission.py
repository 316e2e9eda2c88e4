"""Which sequences are accepted at all; everything else about them is decided in plan()."""

from shared.messages import Refusal
from worker.schedule.paging import Paging
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import WaitingQueue
from worker.schedule.sequence import Sequence

RESERVED_SHARE = 8  # one part in so many of the queue is kept for tenants with little or nothing in it


class Refused(Exception):
    """A sequence was not accepted; `reason` and the text go to the client."""

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
        raise TooLong(f"prompt and max_tokens are {longest} tokens, but at most {config.max_seq_len} are possible")
    if not paging.fits(max(longest - 1, tokens)):  # the last token's K/V is never needed
        raise TooLong(f"prompt and max_tokens are {longest} tokens, which is more than the K/V pool can hold")


def check_queue(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue, running: int) -> None:
    """Raises QueueFull if too many wait. A sequence is always accepted if none waits and fewer than a batch run."""
    waiting = len(queue)
    if waiting >= config.max_waiting_requests and (waiting or running >= config.max_batch_size):
        raise QueueFull(f"{waiting} requests are waiting, and at most {config.max_waiting_requests} may wait")
    if waiting and 0 < config.max_waiting_tokens < queue.tokens + len(sequence.tokens):
        raise QueueFull(f"{queue.tokens} prompt tokens are waiting, and at most {config.max_waiting_tokens} may wait")
    if sequence.tenant:
        _check_share(sequence, config, queue)


def _check_share(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue) -> None:
    """A tenant may have seven times as much waiting as it leaves free for others, and one request in any case.

    So one tenant alone can fill seven eighths of the queue, two nearly half of it each, and however many there are, the
    next one finds a place.
    """
    requests, tokens = queue.tenants.waiting(sequence.tenant)
    ratio = RESERVED_SHARE - 1
    if requests and requests >= ratio * (config.max_waiting_requests - len(queue) - 1):
        raise QueueFull(f"{requests} requests of {sequence.tenant} are waiting; other places are kept for other keys")
    free = config.max_waiting_tokens - queue.tokens - len(sequence.tokens)
    if requests and config.max_waiting_tokens and tokens >= ratio * free:
        raise QueueFull(f"{tokens} prompt tokens of {sequence.tenant} are waiting; the rest is kept for other keys")
