"""The data that decides when a waiting sequence may run: its tenant, priority, group and deadline."""

from dataclasses import dataclass


@dataclass(slots=True)
class Turn:
    """The place of a sequence in the queue. queue.py and fair_queue.py read it; fair_queue.py updates the charge."""

    group: int = 0  # group id, equal for all sequences of one prompt, see queue.py; 0: no group
    priority: int = 0  # lower goes first
    deadline: float = float("inf")  # seconds of the loop's clock
    tenant: str = ""  # the name of the API key that the request came with, see fair_queue.py
    charged_tokens: int = 0  # tokens already counted in its tenant's account
    preempted_for: bool = False  # whether running sequences were already preempted to admit it
