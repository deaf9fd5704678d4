"""A process's profile of itself, in speedscope's format."""

from __future__ import annotations

import json
import threading

import jsonschema
import pytest

from tandem.process import Profiler

# Of speedscope's file format, the part that is written.
FORMAT = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "shared": {"type": "object", "properties": {"frames": {"type": "array", "items": {"required": ["name"]}}}},
        "profiles": {
            "type": "array",
            "items": {
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "properties": {
                    "type": {"const": "sampled"},
                    "unit": {"const": "seconds"},
                    "samples": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                    "weights": {"type": "array", "items": {"type": "number", "minimum": 0}},
                },
            },
        },
    },
}


def spin(until: threading.Event) -> None:
    while not until.is_set():
        sum(range(1000))


def test_a_thread_is_seen_where_it_is() -> None:
    ended = threading.Event()
    worker = threading.Thread(target=spin, args=(ended,), name="spinning")
    worker.start()
    try:
        made = json.loads(Profiler().profile(0.3, "a worker"))
    finally:
        ended.set()
        worker.join()
    jsonschema.validate(made, FORMAT)
    frames = made["shared"]["frames"]
    (found,) = (profile for profile in made["profiles"] if profile["name"] == "spinning")
    assert len(found["samples"]) == len(found["weights"]) > 0
    assert all("spin" in [frames[index]["name"] for index in stack] for stack in found["samples"])
    assert found["endValue"] == pytest.approx(sum(found["weights"]))


@pytest.mark.parametrize("seconds", [0.0, -1.0, 61.0, float("nan")])
def test_how_long_it_may_take_is_bounded(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be"):
        Profiler().profile(seconds, "x")


def test_one_at_a_time() -> None:
    profiler = Profiler()
    with profiler._running, pytest.raises(RuntimeError, match="another profile"):
        profiler.profile(0.1, "x")
