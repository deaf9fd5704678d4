"""Python's search for garbage, which finds none where nothing has ended yet, and costs half of a process' start."""

import gc
import sys

# Objects made and not yet gone that it takes for a search. Python's own 700 are a handful of requests, which all still
# run: a fifth of a gateway's time went into finding nothing.
YOUNG = 50_000


def starting() -> None:
    """Called before anything large is imported: no search until `settled`."""
    gc.disable()


def settled() -> None:
    """All is made that a process is made of: it stays to the end, and to look for garbage there would stop every
    request for 0.1 s.

    From now on the thread's event loop keeps no list of the asynchronous generators that run, which costs each of a
    request's as much as what it does. Who makes one closes it; those that nobody has closed the loop still does.
    """
    sys.set_asyncgen_hooks(firstiter=None)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
    gc.enable()
