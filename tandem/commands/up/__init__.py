"""`tandem up`: a whole cluster, on this machine or on Ray, until Ctrl-C. Other commands and benchmarks may enter."""

from __future__ import annotations

import asyncio
import os

from tandem.commands.clusters.detached import with_ray_address
from tandem.commands.clusters.running import up_in_background
from tandem.commands.up.checks import check
from tandem.commands.up.environment import for_services
from tandem.commands.up.models import fetched
from tandem.commands.up.run import up_here, up_on_ray
from tandem.commands.up_options import DEMO_MODEL, UpSettings
from tandem.local import ServiceFailed
from tandem.settings import load

DETACH = ("-d", "--detach")

__all__ = ["DEMO_MODEL", "UpSettings", "main"]


def main(arguments: list[str]) -> None:
    given = with_ray_address(arguments)
    settings = load(UpSettings, ["--detach" if one == "-d" else one for one in given], "tandem up")
    try:
        settings = settings.found()
        environment = for_services(os.environ)
        cluster = settings.cluster(environment)
        if settings.file is not None and not settings.ray:
            cluster = fetched(cluster)
        check(settings, cluster)
        if settings.detach and not settings.ray:
            up_in_background([one for one in given if one not in DETACH], settings.logs, settings.ready_timeout_s)
            return
        run = up_on_ray if settings.ray else up_here
        asyncio.run(run(settings, cluster, environment))
    except (ServiceFailed, ConnectionError, TimeoutError, ValueError) as error:
        raise SystemExit(f"tandem up: {error}") from None
