"""Python's search for garbage, which finds none where nothing has ended yet, and costs half of a process' start."""

import ctypes
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


def let_go(error: BaseException) -> None:
    """Drops the tracebacks of an error that was answered, and of those that led to it.

    Their frames hold the request's body, and often the error itself: a cycle that stays until garbage is looked for.
    """
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (one := waiting.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            waiting += one.__context__, one.__cause__


def give_back() -> None:
    """Returns to the system what was freed and lies between what is in use. Takes milliseconds: call it on a thread."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
