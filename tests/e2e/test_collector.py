"""A real collector between the processes and where their spans are kept: rotel, from its wheel."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import rotel

from tandem.local import free_ports
from tandem.process import dying_with_parent
from tests.e2e.cluster import BOUND_S, eventually, running_cluster
from tests.e2e.collector import collecting

pytestmark = pytest.mark.long
NUM_REQUESTS = 20
OF_EACH = {
    "tandem-gateway": {"text_completion tandem-demo", "queue", "route", "reserve", "prefill", "decode"},
    "tandem-prefill": {"prefill", "kv.transfer"},
    "tandem-decode": {"decode"},
}


@contextmanager
def running_rotel(folder: Path, backend: str) -> Iterator[str]:
    """Passes on to `backend` what it gets at the address that this yields."""
    grpc_port, http_port = free_ports(2)
    agent = Path(rotel.__file__).parent / "rotel-agent"
    options = {
        "otlp-grpc-endpoint": f"127.0.0.1:{grpc_port}", "otlp-http-endpoint": f"127.0.0.1:{http_port}",
        "exporter": "otlp", "otlp-exporter-endpoint": backend, "otlp-exporter-protocol": "grpc",
        "traces-batch-timeout": "200ms",
    }  # fmt: skip
    with (folder / "rotel.log").open("w", encoding="utf-8") as log:
        command = dying_with_parent(str(agent), "start", *(f"--{name}={value}" for name, value in options.items()))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{grpc_port}"
        finally:
            process.terminate()
            process.wait(30)


def test_a_collector_gets_each_span_of_each_request_once(tmp_path: Path) -> None:
    with collecting() as (backend, address), running_rotel(tmp_path, address) as endpoint:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with running_cluster(tmp_path, "--disaggregation=require", env=env) as cluster:

            def ask(number: int) -> str:
                trace_id = f"{number + 1:032x}"
                body = {"model": "tandem-demo", "prompt": f"def f{number}(", "max_tokens": 4, "ignore_eos": True}
                headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
                httpx.post(f"{cluster.http}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
                return trace_id

            with ThreadPoolExecutor(4) as threads:
                traces = list(threads.map(ask, range(NUM_REQUESTS)))
            each = Counter((service, name) for service, names in OF_EACH.items() for name in names)
            eventually(
                lambda: all(Counter((s, one.name) for s, one in backend.spans.get(t, [])) == each for t in traces),
                BOUND_S, "each span of each request arrives once",
            )  # fmt: skip
            root = "text_completion tandem-demo"
            assert [backend.orphans(trace_id, root) for trace_id in traces] == [[]] * NUM_REQUESTS
