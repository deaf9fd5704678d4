"""GPU benchmarks on a CPU, at a small scale: every row is there, and each that cannot be measured is named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS, measure
from benchmarks.gpu.bare import CANNOT, PEER_VLLM
from benchmarks.gpu.rows import FULL, SMALL, ReportRow
from benchmarks.gpu.serving import NAMES, cluster
from benchmarks.models import made
from services.gateway.settings import GatewaySettings
from tandem.cluster import Cluster, check_settings
from tandem.worker import WorkerSettings


@pytest.mark.long
def test_rows_have_ratios_versions_and_a_date_and_what_fails_is_named(tmp_path: Path) -> None:
    out, model = tmp_path / "gpu.json", made(SMALL.shape, tmp_path / "tiny")
    assert measure(SMALL, model, ["engine", "transfer"], out) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["failed"] == {}
    assert [row["name"] for row in found["rows"]] == [
        "decode, batch 1", "decode, batch 3", "prefill of 64 tokens", "KV by tcp",
    ]  # fmt: skip
    assert all(row["ratio"] > 0 and row["met"] is not None for row in found["rows"])
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["date"].startswith("20")
    assert measure(replace(SMALL, prompt=1 << 20), model, ["engine", "unknown"], out) == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found["failed"]) == ["engine", "unknown"]
    assert "token_ids" in found["failed"]["engine"]


@pytest.mark.long
def test_a_cluster_that_does_not_start_has_failed_and_an_absent_peer_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = tmp_path / "gpu.json", made(SMALL.shape, tmp_path / "tiny")
    monkeypatch.delenv(PEER_VLLM, raising=False)
    assert measure(SMALL, model, ["vllm"], out) == CANNOT
    assert measure(replace(SMALL, kv_mib=0), model, ["vllm", "serving"], out) == 1
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["cannot"] == {"vllm": "vLLM is not installed here"}
    assert found["failed"]["serving"].startswith("PeerUnavailable: the process ended; its log is ")


@pytest.mark.parametrize("name", NAMES)
def test_the_clusters_are_ones_that_up_takes(name: str) -> None:
    made = Cluster.model_validate(cluster(FULL, Path("models/demo/target"), name, 8000))
    check_settings([(pool.name, pool.settings) for pool in made.pools], WorkerSettings)
    check_settings([("gateway", made.gateway.settings)], GatewaySettings)
    assert made.pools[0].settings["device"] == "cuda"


def test_a_ratio_is_missed_on_its_own_side() -> None:
    assert ReportRow("", "", 7.0, "", 10.0, wanted=0.8).met is False
    assert ReportRow("", "", 8.0, "", 10.0, wanted=0.8).met is True
    assert ReportRow("", "", 12.0, "", 10.0, wanted=1.1, better="lower").met is False
    assert ReportRow("", "", 12.0, "", 10.0, better="lower").met is None


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_device_it_says_so_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == CANNOT
    assert done.stdout.count("\n") == 1
    assert "sees no CUDA device" in done.stdout
    assert set(PARTS) == {"engine", "transfer", "serving", "vllm"}
