"""`tandem doctor`: is the cluster whole? Redis, every worker, a block over every prefill-decode pair, the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem import rpc
from tandem.checkpoints import described, misfit, weights_bytes
from tandem.commands.clusters import UP_ADDRESSES
from tandem.commands.clusters.gateways import http_client
from tandem.commands.clusters.own_cluster import with_own_password, with_own_secret
from tandem.commands.up_options import UpSettings
from tandem.machine.resources import usable_memory
from tandem.process import IntegrityReport
from tandem.registry import LiveWorker, ModelStatus, RedisAddress, Registry, RegistryUnavailable, Role, Wakefulness
from tandem.security import ClusterSettings
from tandem.settings import load
from tandem.v1 import llm_pb2, llm_pb2_grpc, prefill_pb2, prefill_pb2_grpc, process_pb2, process_pb2_grpc


class DoctorSettings(ClusterSettings):
    """Check a running cluster, or only the parts whose addresses are given, and name what is broken."""

    redis_url: str = Field("", description="the registry: checks it, the workers, and every prefill-decode pair")
    namespace: str = Field("tandem", min_length=1, description="prefix of the registry's keys: one per cluster")
    model: str = Field("", description="check only the workers of this model, or of those of this alias; default: all")
    gateway_url: str = Field("", description="the gateway's HTTP address: checks whether it is ready")
    grpc_address: str = Field("", description="the gateway's gRPC address: checks whether it serves a model")
    api_key: str = Field("", description="as `tandem keys add` printed it, where the gateway asks for one")
    integrity: bool = Field(False, description="look into every process for what is held by no request")
    fit: str = Field("", description="instead: does this model fit here? its name, folder or GGUF file")
    timeout_s: float = Field(5.0, gt=0, description="bound of each check")

    def addressed(self) -> DoctorSettings:
        """Returns the settings with the addresses and the password of `tandem up` where none is given."""
        given = self.redis_url or self.gateway_url or self.grpc_address
        said = self if given else self.model_copy(update=UP_ADDRESSES)
        said = said.model_copy(update={"redis_url": with_own_password(said.redis_url)})
        return with_own_secret(said, said.redis_url, said.namespace)


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    good: bool
    detail: str
    link: tuple[str, str, str] | None = None  # prefill worker, decode worker, speed and distance
    warns: bool = False  # fine if it is intended

    @property
    def mark(self) -> str:
        if not self.good:
            return "[red]BROKEN[/]"
        return "[yellow]warns [/]" if self.warns else "[green]ok    [/]"


def main(arguments: list[str]) -> None:
    settings = load(DoctorSettings, arguments, "tandem doctor")
    if settings.fit:
        print(fit(settings.fit))
        return
    findings = asyncio.run(examine(settings.addressed()))
    console, width = Console(), max(len(finding.what) for finding in findings)
    for finding in findings:
        console.print(
            f"{finding.mark}  {finding.what:<{width}}  {escape(finding.detail)}", soft_wrap=True, highlight=False
        )
    if links := [finding.link for finding in findings if finding.link]:
        console.print(matrix(links))
    broken = [finding.what for finding in findings if not finding.good]
    if broken:
        raise SystemExit(f"broken: {', '.join(broken)}")


def matrix(links: Sequence[tuple[str, str, str]]) -> Table:
    """Returns a table of each pair's bandwidth and distance: prefill workers down, decode workers across."""
    found = {(prefill, decode): text for prefill, decode, text in links}
    decodes = sorted({decode for _, decode in found})
    table = Table("prefill -> decode", *map(escape, decodes), box=box.SIMPLE)
    for prefill in sorted({prefill for prefill, _ in found}):
        table.add_row(escape(prefill), *(found.get((prefill, decode), "no link") for decode in decodes))
    return table


def fit(model: str) -> str:
    """Returns the memory that `tandem up` needs for a model and what there is. No weights are fetched.

    Raises:
        SystemExit: the model does not fit or does not exist.
    """
    try:
        needs = UpSettings(model_path=Path(model)).needs(weights_bytes(model))
    except ValueError as error:
        raise SystemExit(f"tandem doctor: {error}") from None
    if why := misfit(needs, usable_memory()):
        raise SystemExit(f"tandem doctor: {model}: {why}")
    return f"{model}: fits: {described(needs, usable_memory())}"


async def examine(settings: DoctorSettings) -> list[Finding]:
    """Returns the findings of all checks."""
    findings = await _registry(settings) if settings.redis_url else []
    if settings.gateway_url:
        findings.append(await _http(settings))
        findings += [await _gateway_integrity("gateway", settings.gateway_url, settings)] if settings.integrity else []
    if settings.grpc_address:
        findings.append(await _grpc(settings))
    return findings


async def _registry(settings: DoctorSettings) -> list[Finding]:
    try:
        redis = RedisAddress.parse(settings.redis_url)
    except ValueError as error:
        return [Finding("redis", False, str(error))]
    try:
        registry = Registry.connect(settings.redis_url, namespace=settings.namespace)
        try:
            names = await _meant(registry, settings)
            workers = [w for w in await registry.workers() if not names or w.info.model in names]
            gateways = [g for g in await registry.gateways.live() if not names or names & {*g.model.split(", ")}]
            sleeping = [one for one in (await registry.on_demand.ask({})).values() if not names or one.name in names]
            held, releases = await registry.check_integrity(), await registry.releases.others()
            wrong = await _wrong_rows(registry)
        finally:
            await registry.close()
    except RegistryUnavailable as error:
        return [Finding("redis", False, str(error))]
    by_role = {role: [w for w in workers if w.info.role is role] for role in Role}
    findings = [Finding("redis", True, f"{redis}: {len(workers)} workers registered")]
    findings += [Finding("registry", False, why) for why in wrong] + _mixed(workers)
    findings += [Finding("another release", True, str(release)) for release in releases]
    if settings.integrity:
        findings.append(_whole("redis", held))
    findings += [Finding(one.name, one.state is not Wakefulness.FAILED, _sleeps(one)) for one in sleeping]
    all_asleep = bool(sleeping) and not workers
    for role, of_role in by_role.items():
        if not of_role and not all_asleep:
            findings.append(Finding(f"{role.value} workers", False, "none is registered: start one, or read its log"))
    checks: list[Awaitable[Finding]] = [_worker(w, settings) for w in workers]
    meant = [(p, d) for p in by_role[Role.PREFILL] for d in by_role[Role.DECODE] if _same_weights(p, d)]
    if all(by_role.values()) and not meant:
        findings.append(Finding("pairs", False, "no prefill and decode worker serve the same weights"))
    checks += [_pair(p, d, settings) for p, d in meant]
    checks += [_worker_integrity(w, settings) for w in workers if settings.integrity]
    if settings.integrity:
        own = {gateway.own_http or gateway.http for gateway in gateways}
        others = sorted(address for address in own if f"http://{address}" != settings.gateway_url)
        checks += [_gateway_integrity(f"gateway {address}", f"http://{address}", settings) for address in others]
    return [*findings, *await asyncio.gather(*checks)]


async def _wrong_rows(registry: Registry) -> list[str]:
    """Returns a line for each unreadable row of the registry, and one if there may be more."""
    await registry.adapters.all()
    await registry.aliases.all()
    evicts = await registry.unreadable.evicts()
    return [*([evicts] if evicts else []), *registry.unreadable.report()]


async def _meant(registry: Registry, settings: DoctorSettings) -> set[str]:
    """Returns the names of the models to check; empty: all. Aliases of a cluster.yaml are known only to gateways."""
    name = settings.model
    alias = (await registry.aliases.all()).by_name.get(name)
    targets = list(alias.targets) if alias else []
    if not targets and name and settings.grpc_address:
        with suppress(aio.AioRpcError):
            listed = {model.id: model for model in (await _listed_models(settings)).models}
            targets = [*listed[name].weights, *listed[name].fallbacks] if name in listed else []
    adapters = (await registry.adapters.all()).by_name
    bases = {adapters[one].model if one in adapters else one for one in targets or [name]}
    return bases - {""}


def _mixed(workers: Sequence[LiveWorker]) -> list[Finding]:
    """Returns findings about models with two fingerprints, whose workers tokenize differently."""
    found: dict[str, dict[str, list[str]]] = {}
    for worker in workers:
        found.setdefault(worker.info.model, {}).setdefault(worker.info.fingerprint, []).append(worker.info.worker_id)
    texts = {
        model: "; ".join(f"{fingerprint[:12]} by {', '.join(names)}" for fingerprint, names in sorted(of.items()))
        for model, of in found.items()
        if len(of) > 1
    }
    why = "workers of other files have one name, which is meant only while they are rolled out"
    return [Finding(model, True, f"{why}: {text}", warns=True) for model, text in sorted(texts.items())]


def _sleeps(status: ModelStatus) -> str:
    return f"starts when it is asked for; {status.state}" + (f": {status.reason}" if status.reason else "")


def _same_weights(prefill: LiveWorker, decode: LiveWorker) -> bool:
    """True if the two should pair: workers of other models or revisions do not."""
    return (prefill.info.model, prefill.info.revision) == (decode.info.model, decode.info.revision)


async def _worker(worker: LiveWorker, settings: DoctorSettings) -> Finding:
    info, load_ = worker.info, worker.load
    try:
        async with rpc.channel(info.grpc_address, settings.security) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=settings.timeout_s)
    except aio.AioRpcError as error:
        return Finding(info.title, False, f"{info.grpc_address}: {error.code().name}: {error.details()}")
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    state = "serving" if serving else "not serving"
    blocks = f"{load_.free_blocks} of {info.num_blocks} blocks free"
    return Finding(info.title, serving, f"{info.grpc_address}: {state} {info.model}, {blocks}")


def _whole(who: str, report: IntegrityReport) -> Finding:
    return Finding(f"{who}, integrity", not report.violations, str(report))


async def _worker_integrity(worker: LiveWorker, settings: DoctorSettings) -> Finding:
    try:
        async with rpc.channel(worker.info.grpc_address, settings.security) as channel:
            stub = process_pb2_grpc.IntegrityServiceStub(channel)
            answer = await stub.CheckIntegrity(process_pb2.CheckIntegrityRequest(), timeout=settings.timeout_s)
    except aio.AioRpcError as error:
        return _whole(worker.info.worker_id, _unchecked(f"{error.code().name}: {error.details()}"))
    return _whole(worker.info.worker_id, IntegrityReport(dict(answer.held), tuple(answer.violations)))


async def _gateway_integrity(who: str, address: str, settings: DoctorSettings) -> Finding:
    url = f"{address}/debug/integrity"
    try:
        async with http_client(settings.timeout_s) as client:
            answer = (await client.get(url)).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return _whole(who, _unchecked(f"{url}: {error or type(error).__name__}"))
    return _whole(who, IntegrityReport(answer["held"], tuple(answer["violations"])))


def _unchecked(why: str) -> IntegrityReport:
    return IntegrityReport(violations=(f"not checked: {why}",))


async def _pair(prefill: LiveWorker, decode: LiveWorker, settings: DoctorSettings) -> Finding:
    what = f"{prefill.info.title} -> {decode.info.title}"
    if prefill.info.layout_hash != decode.info.layout_hash:
        return Finding(what, False, "their KV layouts differ (dtype or block size): they never pair")
    request = prefill_pb2.ProbeLinkRequest(decode_worker=decode.info.worker_id)
    try:
        async with rpc.channel(prefill.info.grpc_address, settings.security) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            answer = await stub.ProbeLink(request, timeout=settings.timeout_s)
    except aio.AioRpcError as error:
        return Finding(what, False, f"no block moves: {error.code().name}: {error.details()}")
    rate = answer.bytes / max(answer.elapsed_us, 1) / 1000
    transport = f"{answer.transport} ({answer.carrier})" if answer.carrier else answer.transport
    moved = f"{answer.bytes:,} bytes over {transport} and back in {answer.elapsed_us / 1000:.2f} ms"
    refused = "".join(f"; fell back from {name}: {why}" for name, why in answer.refused.items())
    way = prefill.info.location.way_to(decode.info.location)
    link = prefill.info.title, decode.info.title, f"{rate:.1f} GB/s, {way}"
    return Finding(what, True, f"{moved} ({rate:.1f} GB/s, {way}){refused}", link)


async def _http(settings: DoctorSettings) -> Finding:
    url = f"{settings.gateway_url}/health/ready"
    try:
        async with http_client(settings.timeout_s) as client:
            answer = await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding("gateway, HTTP", False, f"{url}: {error or type(error).__name__}")
    return Finding("gateway, HTTP", answer.status_code == 200, f"{url}: {answer.text}")


async def _grpc(settings: DoctorSettings) -> Finding:
    what, address = "gateway, gRPC", settings.grpc_address
    try:
        async with rpc.channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=settings.timeout_s)
        listed = await _listed_models(settings)
    except aio.AioRpcError as error:
        return Finding(what, False, f"{address}: {error.code().name}: {error.details()}")
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    models = ", ".join(model.id for model in listed.models) or "no model"
    return Finding(what, serving and bool(listed.models), f"{address}: {'' if serving else 'not '}serving {models}")


async def _listed_models(settings: DoctorSettings) -> llm_pb2.ListModelsResponse:
    """Raises AioRpcError."""
    key = [("authorization", f"Bearer {settings.api_key}")] if settings.api_key else []
    async with rpc.channel(settings.grpc_address) as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        return await service.ListModels(llm_pb2.ListModelsRequest(), timeout=settings.timeout_s, metadata=key)
