"""Fixtures that every test folder may use."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from xdist.scheduler import LoadFileScheduling
from xdist.scheduler.protocol import Scheduling

from tandem.process import telemetry

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests' own clients ask servers of this machine, whatever proxy it has for others.
os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), "127.0.0.1", "localhost", "::1")))
# Each of a client's connections reads the certificates that it trusts; the public ones would take 25 ms of CPU a time.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("trusted.pem"))

gc.disable()  # until test files have imported what they need

# The same examples each time, and none fails for the time that it took. `make check PART=security` looks for others.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("guard", deadline=None, max_examples=1000)  # see tests/fuzzing.py
settings.load_profile("tests")

telemetry.set_up("tests", "tests", "warning")

ROOT = Path(__file__).parents[1]
# Files that share what takes long to start: clusters of a conftest.py, a server, an SDK that takes seconds to import.
SHARED = {
    "clusters": [f"tests/e2e/test_{name}.py" for name in ("clients", "commands", "exact", "prometheus", "structured")],
    "a benchmark's server": ["tests/benchmarks/test_load.py", "tests/benchmarks/test_serving.py"],
    "Anthropic's SDK": ["tests/gateway/test_messages_fields.py", "tests/gateway/test_strict_clients.py"],
}
SHARES = {file: what for what, files in SHARED.items() for file in files}


class OneStart(LoadFileScheduling):
    """Each file to one process, those that share something to the same: so each of these is started once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SHARES.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return OneStart(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """Exempts what was imported from garbage collection, which still runs: tests leave engines behind."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "models" / "demo" / "target"


@pytest.fixture
def info_logs() -> Iterator[None]:
    """Logs have information, too; other tests log warnings alone."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    yield
    structlog.configure(wrapper_class=before)


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    """The SDK can be installed once in a process: where it is, it has one processor more."""
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    exporter.clear()
    yield exporter
    exporter.clear()
