"""`python -m tests.chaos.explorer`: run many schedules, or one again.

python -m tests.chaos.explorer 10000 --first 0        schedules of these seeds, on every core
python -m tests.chaos.explorer 2000 --kinds disk-lose kill    with faults of these kinds alone
python -m tests.chaos.explorer --replay 4711          one, with its shrunk form and its timeline where it fails
python -m tests.chaos.explorer --replay 4711 --keep 0,2/1/3 --draw    only these requests / faults / luck of it, drawn
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.local import RedisServer
from tandem.machine.resources import usable_cpus
from tests.chaos.explorer.many import explore, replay_line, summary
from tests.chaos.explorer.run import Explorer
from tests.chaos.explorer.schedule import KINDS, schedule_of
from tests.chaos.explorer.shrink import parse, shrink
from tests.chaos.explorer.timeline import draw
from tests.simulation.redis import RedisStore

MODEL = Path(__file__).parents[3] / "models" / "demo" / "target"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.explorer")
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=usable_cpus())
    parser.add_argument("--replay", type=int)
    parser.add_argument("--keep", default="")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=())
    arguments = parser.parse_args()
    if arguments.replay is not None:
        sys.exit(replay(arguments.replay, arguments.keep, arguments.draw, arguments.kinds))
    seeds = range(arguments.first, arguments.first + arguments.count)
    report = explore(MODEL, seeds, jobs=arguments.jobs, kinds=arguments.kinds)
    print(summary(report))
    sys.exit(bool(report.failed))


def replay(seed: int, keep: str, drawn: bool, kinds: Sequence[str] = ()) -> bool:
    """Runs one schedule again; True if it fails."""
    with RedisServer.start() as server, RedisStore(server.port) as store:
        explorer = Explorer(store, MODEL)
        schedule = schedule_of(seed, kinds)
        if keep:
            schedule = schedule.only(*parse(keep))
        result = explorer.run(schedule)
        if result.violations and not keep:
            result, kept = shrink(schedule, explorer.run)
            print(f"shrunk: {replay_line(seed)} --keep {kept} --draw")
        print(*(f"request {request}" for request in result.schedule.requests), sep="\n")
        print(*(f"fault {fault}" for fault in result.schedule.faults), sep="\n")
        if drawn or result.violations:
            print(draw(result.events))
        print(*(result.violations or ["no violation"]), sep="\n")
    return bool(result.violations)


if __name__ == "__main__":
    main()
