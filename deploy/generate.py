"""`python -m deploy.generate`: what is written once and shown twice.

tandem.catalogue.metrics ──> docs/metrics.md        tandem.catalogue.spans ──> the tables in docs/tracing.md
settings classes ──> docs/settings.md; `settings` in values.schema.json
values.yaml ──> the table in docs/helm.md; descriptions in values.schema.json
picture.py ──> docs/architecture.svg        tandem.__version__ ──> chart, images        the console's icon ──> chart
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.picture import architecture
from services.decode.settings import DecodeSettings
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KVStoreSettings
from services.prefill.settings import PrefillSettings
from tandem import __version__
from tandem.catalogue import metrics, spans
from tandem.service_settings import MetricsSettings, RequestSettings, ServiceSettings
from tandem.settings import Settings
from tandem.worker import WorkerSettings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm"
ICON = ROOT / "services" / "gateway" / "console" / "page" / "icon.svg"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SERVICES: dict[str, type[Settings]] = {
    "gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings, "kvstore": KVStoreSettings,
}  # fmt: skip
# Of each section of docs/settings.md: its first line and the settings, of which it shows what no section before it has.
SECTIONS: dict[str, tuple[str, type[Settings]]] = {
    "every service": ("Within a cluster all or none have a secret and TLS: docs/security.md.", ServiceSettings),
    "gateway, prefill and decode": ("What requests go through.", RequestSettings),
    "prefill, decode and kvstore": ("A gateway has its metrics on its HTTP port.", MetricsSettings),
    "gateway": ("`python -m services.gateway`", GatewaySettings),
    "prefill and decode": ("`python -m services.prefill`, `python -m services.decode`", WorkerSettings),
    "kvstore": ("`python -m services.kvstore`", KVStoreSettings),
}
# What the chart itself sets, from other values or from the pod; and own_http_port, for a pod is one process.
SET_BY_CHART = {
    "redis_url", "redis_port", "namespace", "host", "http_port", "grpc_port", "transfer_port",
    "health_port", "metrics_port", "model_path", "model_name", "models", "aliases", "advertise_host", "worker_id",
    "ready_when", "shared_cores", "api_keys", "insecure", "cluster_secret", "tls",
    "redis_password", "own_http_port", "store_url", "store_port",
}  # fmt: skip
Schema = dict[str, Any]


def main() -> None:
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")


def documents() -> dict[Path, str]:
    """Each file that is generated, wholly or in part, as it should be."""
    guide = ROOT / "docs" / "helm.md"
    schema, tracing = CHART / "values.schema.json", ROOT / "docs" / "tracing.md"
    return {
        ROOT / "docs" / "settings.md": settings_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        tracing: _between(tracing.read_text(encoding="utf-8"), "spans", spans_tables()),
        guide: with_version(
            _between(
                guide.read_text(encoding="utf-8"),
                "values",
                values_table((CHART / "values.yaml").read_text(encoding="utf-8")),
            )
        ),
        DOCKERFILE: with_version(DOCKERFILE.read_text(encoding="utf-8")),
        schema: with_descriptions(
            with_settings(json.loads(schema.read_text(encoding="utf-8"))),
            (CHART / "values.yaml").read_text(encoding="utf-8"),
        ),
        ROOT / "docs" / "architecture.svg": architecture(),
        CHART / "Chart.yaml": with_icon(
            with_version((CHART / "Chart.yaml").read_text(encoding="utf-8")), ICON.read_bytes()
        ),
    }


VERSIONS = r"(^version: |^appVersion: |^ARG VERSION=|ghcr\.io/tandem-llm/[^\s:]+:)\d\S*"


def with_version(text: str) -> str:
    """The chart, images and their names have the package's version."""
    return re.sub(VERSIONS, rf"\g<1>{__version__}", text, flags=re.MULTILINE)


def with_icon(chart: str, icon: bytes) -> str:
    """The chart carries its picture, as an address that needs no host."""
    return re.sub(r"(?m)^icon: .*$", f"icon: data:image/svg+xml;base64,{b64encode(icon).decode()}", chart)


# --- settings ---


def settings_page() -> str:
    lines = ["# Settings", "", "<!-- Written by `make docs`. -->", ""]
    lines += [
        "Each service reads its settings from defaults, then the environment (`TANDEM_KV_MEMORY=4GiB`), then the",
        "command line (`--kv-memory=4GiB`). Lists and maps are JSON in the environment. A bad value ends the process",
        "with status 2 and a line that names the variable or the option. In the Helm chart they are `settings` of a",
        "workload, by name. `tandem up` hands variables that it has no option for to its services, and refuses those",
        "that set nothing.",
    ]
    shown: list[type[Settings]] = []
    for title, (intro, settings) in SECTIONS.items():
        inherited = {name for other in shown if issubclass(settings, other) for name in other.model_fields}
        lines += ["", f"## {title}", "", intro, "", "| setting | type | default | |", "| --- | --- | --- | --- |"]
        lines += [_row(*row) for row in _settings_rows(settings, inherited)]
        shown.append(settings)
    return "\n".join(lines) + "\n"


def _settings_rows(settings: type[Settings], inherited: set[str]) -> Iterator[tuple[str, str, str, str]]:
    schema = settings.model_json_schema()
    for name, field in _fields(settings).items():
        if name in inherited:
            continue
        required = name in schema.get("required", ())
        default = "required" if required else _code(schema["properties"][name].get("default"))
        yield _code(name), type_of(field), default, schema["properties"][name].get("description", "")


def _fields(settings: type[Settings]) -> dict[str, Schema]:
    """The JSON schema of each field, references resolved."""
    schema = settings.model_json_schema()
    return {name: _resolved(field, schema.get("$defs", {})) for name, field in schema["properties"].items()}


def _resolved(schema: Any, named: Schema) -> Any:
    if isinstance(schema, list):
        return [_resolved(item, named) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = named[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}
    return {
        key: _resolved(value, named)
        for key, value in schema.items()
        if key not in ("title", "description", "default", "format")
    }


def type_of(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(type_of, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(_code(choice) for choice in schema["enum"])
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {type_of(schema['items'])}"
    if kind == "object" and "properties" in schema:
        return "map with " + ", ".join(f"{_code(name)} ({type_of(one)})" for name, one in schema["properties"].items())
    if kind == "object":
        return f"map to {type_of(schema.get('additionalProperties', {}))}"
    words = {"string": "text", "null": "nothing", "boolean": "true or false"}
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    return " ".join([words.get(kind, kind), *(f"{sign} {schema[key]:g}" for key, sign in bounds if key in schema)])


def with_settings(schema: Schema) -> Schema:
    """The chart's schema, in which a workload's settings are those of its service."""
    for service in ("gateway", "worker", "kvstore"):
        settings = SERVICES["prefill" if service == "worker" else service]
        said = {name: field.description for name, field in settings.model_fields.items()}
        fields = {
            name: field | ({"description": said[name]} if said[name] else {})
            for name, field in _fields(settings).items()
            if name not in SET_BY_CHART
        }
        known = {"type": "object", "additionalProperties": False, "properties": fields}
        schema["$defs"][f"{service}Settings"] = known
    return schema


def with_descriptions(schema: Schema, values: str) -> str:
    """The chart's schema, in which a value is described as in values.yaml, and a pool's as of all: editors show it."""
    described: dict[tuple[str, ...], str] = {}
    for path, comment in commented(values):
        described[path] = comment or described.get(path, "")
        if path[0] == "workers":
            described["pools", "[]", *path[1:]] = comment
    for path, comment in described.items():
        place = _place(schema, path, schema["$defs"])
        if place is not None and comment:
            place["description"] = comment
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _place(at: Schema, path: tuple[str, ...], named: Schema) -> Schema | None:
    """The schema of a value, or the one that it shares with others; None if there is none."""
    for part in path:
        at = named[at["$ref"].rpartition("/")[2]] if "$ref" in at else at
        inner = at.get("items") if part == "[]" else at.get("properties", {}).get(part)
        if inner is None:
            return None
        at = inner
    return at


# --- metrics ---


def metrics_page() -> str:
    lines = ["# Metrics", "", "<!-- Written by `make docs`. -->", ""]
    lines += [
        "Prometheus reads them at `/metrics`: of a gateway on its HTTP port, of workers and the kvstore on their",
        "`--metrics-port`, which `tandem up` gives each of them, on Ray too, and the chart is 9090. Where there is no",
        "Prometheus operator, a gateway knows them all: `GET /metrics/targets` is a list for `http_sd_configs`, with",
        "labels `component`, `worker` (with an API key where the gateway asks for one: then series that name tenants",
        "are sums over them, their label empty, unless the scraper's own key has `manages_models`):",
        "",
        "```yaml",
        "scrape_configs:",
        "  - job_name: tandem",
        "    http_sd_configs: [{url: http://127.0.0.1:8000/metrics/targets, refresh_interval: 15s}]",
        "```",
        "",
        "Names and meanings are vLLM's (`vllm:…`) where vLLM has the thing. Counters are shown with their `_total`; a",
        "histogram has `_bucket`, `_sum` and `_count`. A choice that ended well is one that came to a finish reason.",
    ]
    for title, catalogue in metrics.CATALOGUES.items():
        lines += ["", f"## {title}", "", "| metric | kind | labels | |", "| --- | --- | --- | --- |"]
        for one in catalogue.values():
            labels = ", ".join(map(_code, one.labels))
            reach = f" Buckets from {one.buckets[0]:g} to {one.buckets[-1]:g}." if one.buckets else ""
            lines.append(f"| {_code(one.exposed_as)} | {one.kind} | {labels} | {one.text}{reach} |")
    return "\n".join(lines) + "\n"


# --- spans ---


def spans_tables() -> str:
    lines = ["Any span may have:", "", *_attributes_table(spans.OF_ANY)]
    for span in spans.CATALOGUE:
        lines += ["", f"**{_code(span.name)}** of {span.service}: {span.meaning}", ""]
        lines += _attributes_table(span.attributes)
        for event, attributes in span.events.items():
            having = f" with {', '.join(map(_code, attributes))}" if attributes else ""
            lines += ["", f"An event {_code(event)}{having}."]
    return "\n".join(lines)


def _attributes_table(attributes: dict[str, str]) -> list[str]:
    return ["| attribute | |", "| --- | --- |", *(_row(_code(name), said) for name, said in attributes.items())]


# --- values ---

KEY = re.compile(r"^(?P<indent> *)(?P<item>- )?(?P<key>\w+):(?P<rest>.*)$")


def values_table(text: str) -> str:
    """A row for each value that has a comment, on its line or above it."""
    values, described = yaml.safe_load(text), dict(commented(text))
    lines = ["| value | default | |", "| --- | --- | --- |"]
    for path, comment in described.items():
        if comment:
            has_parts = any(other[: len(path)] == path != other and described[other] for other in described)
            default = "" if has_parts else _code(_at(values, path))
            lines.append(_row(_code(".".join(path).replace(".[]", "[]")), default, comment))
    return "\n".join(lines)


def commented(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and comment of each key, in order. An item of a list is [] in its path; only first items count."""
    above: list[str] = []
    stack: list[tuple[int, tuple[str, ...]]] = []
    seen: set[tuple[str, ...]] = set()
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.strip(" #"))
            continue
        if found := KEY.match(line):
            indent = len(found["indent"]) + (2 if found["item"] else 0)
            while stack and stack[-1][0] >= (indent if not found["item"] else indent - 1):
                stack.pop()
            parent = stack[-1][1] if stack else ()
            if found["item"]:
                parent = (*parent, "[]")
                stack.append((indent - 1, parent))
            path = (*parent, found["key"])
            stack.append((indent, path))
            if path not in seen:
                seen.add(path)
                yield path, " ".join([*above, found["rest"].partition(" # ")[2]]).strip()
        above = []


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values[0] if part == "[]" else values[part]
    return values


# --- text ---


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(value: Any) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _between(text: str, part: str, written: str) -> str:
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{written}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    main()
