"""Makes room for a tenant that waits while others have all the places or pages."""

from worker.schedule.sequence import Sequence
from worker.schedule.state import SchedulerState


def admit_starved(state: SchedulerState, places: int, preempted: list[Sequence], now: float) -> None:
    """Admits a sequence of a tenant with no running sequence, if necessary by preempting others.

    It preempts sequences of the tenant that is most over its fair share, and adds them to `preempted`. This happens
    only if preempted sequences can find their pages again in the prefix cache. It happens only once for each waiting
    sequence, because preempting may not make enough room.

    places: how many sequences may run.
    """
    tenants = state.queue.tenants
    starved = tenants.starved if state.reuses_pages else None
    if starved is None:
        return
    while len(state.running) >= places or not state.join(starved, now):
        tenant = tenants.over_share(places)
        if tenant is None:
            return
        newest = next(sequence for sequence in reversed(state.running) if sequence.turn.tenant == tenant)
        state.preempt(newest, now)
        preempted.append(newest)
        starved.turn.preempted_for = True
