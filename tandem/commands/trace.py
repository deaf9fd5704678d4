"""`tandem trace REQUEST_ID`: one recent request as a file for Perfetto, from whichever gateway remembers it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import quote

import httpx
from pydantic import Field
from pydantic_settings import CliPositionalArg

from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.gateways import addresses, http_client, said_by
from tandem.settings import Settings, load


class TraceSettings(Settings):
    """Write what became of a recent request, hop by hop and layer by layer, to a file that ui.perfetto.dev opens."""

    request_id: CliPositionalArg[str] = Field(description="its id: x-request-id of its answer", min_length=1)
    gateway_url: str = Field(UP_ADDRESSES["gateway_url"], description="the gateway that is asked first")
    redis_url: str = Field(UP_ADDRESSES["redis_url"], description="the registry, which names the other gateways")
    namespace: str = Field("tandem", min_length=1, description="prefix of the registry's keys: one per cluster")
    api_key: str = Field("", description="its tenant's, or one that manages models, where gateways ask for one")
    out: Path | None = Field(None, description="the file; if not given, REQUEST_ID.trace.json")
    timeout_s: float = Field(10.0, gt=0, description="bound of each gateway's answer")


def main(arguments: list[str]) -> None:
    settings = load(TraceSettings, arguments, "tandem trace")
    out = settings.out or Path(re.sub(r"[^\w.-]", "_", settings.request_id) + ".trace.json")
    trace = asyncio.run(fetch(settings))
    out.write_bytes(trace)
    print(f"{out}: open it at https://ui.perfetto.dev")


async def fetch(settings: TraceSettings) -> bytes:
    """
    Raises:
        SystemExit: no gateway remembers it, or one refuses to say.
    """
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    problems = []
    async with http_client(settings.timeout_s, headers) as client:
        for gateway in dict.fromkeys(
            [settings.gateway_url.rstrip("/"), *await addresses(settings.redis_url, settings.namespace)]
        ):
            try:
                answer = await client.get(f"{gateway}/debug/traces/{quote(settings.request_id, safe='')}")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problems.append(f"{gateway}: {error or type(error).__name__}")
                continue
            if answer.status_code == 200:
                return answer.content
            problems.append(f"{gateway}: {said_by(answer)}")
    raise SystemExit("tandem trace: " + "\n".join(problems))
