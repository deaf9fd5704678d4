"""Runs code that recurses deeply in C, whatever the size of the caller's stack."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
_STARTING = threading.Lock()


def on_deep_stack(function: Callable[[], T], stack_bytes: int) -> T:
    """Runs a function on its own thread with a stack of this size; returns or raises what the function does."""
    future: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(function, future), daemon=True)
    with _STARTING:  # the size applies to all threads that the process starts meanwhile
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    try:
        return future.result()
    finally:
        del future  # it has the exception, whose traceback has this frame: a cycle


def _run(function: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
