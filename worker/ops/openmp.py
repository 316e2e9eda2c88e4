"""Sets how OpenMP threads wait for each other.

OpenMP reads the environment when torch is imported, so `spin_briefly` must be called before torch is imported.
"""

import os


def spin_briefly() -> None:
    """Makes waiting threads spin for a few microseconds and then sleep, unless GOMP_SPINCOUNT is set.

    If anything else runs on the machine, threads that spin long at a barrier starve the threads for which they wait
    (measured: with one busy process, a step took 15 times as long). If threads sleep at once, steps are a third slower
    on an idle machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
