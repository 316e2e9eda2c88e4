"""How OpenMP's threads wait for each other; it reads the environment when torch is imported, so this comes before."""

import os


def spin_briefly() -> None:
    """A few microseconds of spinning, then sleep, unless GOMP_SPINCOUNT says otherwise.

    Threads that spin long at a barrier starve whom they wait for as soon as anything else runs on the machine
    (measured: a step took 15 times as long beside one busy process); those that sleep at once make steps a third
    slower on a quiet one.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
