"""Python's cyclic garbage collection, which finds nothing during a process's start, but would take half its time."""

import ctypes
import gc
import sys

# The number of new objects that triggers a collection. Python's default of 700 is a handful of running requests: a
# gateway spent a fifth of its time in collections that found nothing.
YOUNG = 50_000


def starting() -> None:
    """Disables collection until `settled`. To be called before anything large is imported."""
    gc.disable()


def settled() -> None:
    """Enables collection, but excludes all objects made so far: they stay to the end, and to search them would stop
    every request for 0.1 s.

    From now on the thread's event loop keeps no list of running asynchronous generators, which would double the cost of
    each. Code that makes a generator closes it; generators left open are still closed by the loop.
    """
    sys.set_asyncgen_hooks(firstiter=None)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
    gc.enable()


def let_go(error: BaseException) -> None:
    """Drops the tracebacks of an error that was answered, and of the errors that led to it.

    Their frames hold the request's body, and often the error itself: a cycle that would stay until a collection.
    """
    waiting: list[BaseException | None] = [error]
    while waiting:
        if (one := waiting.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            waiting += one.__context__, one.__cause__


def give_back() -> None:
    """Returns freed memory between used blocks to the system. Takes milliseconds: call it on a thread."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc only
        trim(0)
