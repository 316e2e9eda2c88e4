"""The history of a sequence: its times, its preemptions and drafts, and what happened to it at earlier workers."""

from dataclasses import dataclass


@dataclass(slots=True)
class History:
    """The history of a sequence. Times are seconds of the loop's clock; 0: the event has not happened yet."""

    arrival: float = 0.0
    admitted: float = 0.0  # when the sequence first got pages
    first_token: float = 0.0  # when its first output token was applied
    last_token: float = 0.0  # when its latest output token was applied
    preemptions: int = 0
    drafted: int = 0  # draft tokens that were computed
    accepted: int = 0  # draft tokens that were accepted
    crashes: int = 0  # number of worker crashes that the sequence is suspected of having caused
    resumed: bool = False  # whether a worker that is gone had admitted the sequence before
    original_id: int = 0  # the request id at the sequence's first worker; 0 if this is its first worker
