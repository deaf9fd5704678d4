"""Prints what a gateway's requests and tokens cost, as a line of JSON for each line that it reads.

`measures` runs this file in the folder of a tree, whose own benchmarks.gateway starts the gateway and the null worker
that speaks its protocol.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

import tandem
from benchmarks import gateway
from benchmarks.frontends import FRONTS

if TYPE_CHECKING:  # 0.1.0 has other names for them
    from benchmarks.frontends import BackendPace, Front, RunningFront


async def turns(front: Front, running: RunningFront, pace: BackendPace) -> dict[str, float]:
    """Takes the place of one of the loads that a running gateway gets, until there is no more line."""
    while await asyncio.to_thread(sys.stdin.readline):
        requests = await gateway.requests(front, running, pace)
        streams = await gateway.streams(front, running, pace)
        figures = {
            "gateway: a request, ms": requests["CPU of a request, ms"],
            "gateway: a streamed token, us": 1e6 / streams["streamed tokens a CPU second"],
        }
        print(json.dumps(figures), flush=True)
    return {}


if __name__ == "__main__":
    assert Path(tandem.__file__).is_relative_to(Path.cwd()), f"measures {tandem.__file__}"
    gateway.REQUESTS, gateway.AT_ONCE = 500, 100  # Less than benchmarks.gateway itself takes.
    gateway.MEASURES["turns"] = turns
    uvloop.run(gateway.measured(FRONTS["tandem"], ["turns"]))
