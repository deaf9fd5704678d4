"""cluster.yaml: one schema for every launcher, whose errors name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tandem.cluster import Cluster, check_settings, read_cluster
from tandem.machine.resources import usable_cpus
from tandem.worker import WorkerSettings

MODEL = {"id": "demo", "name": "tandem-demo", "weights": {"path": "models/demo/target"}}
BROUGHT = MODEL | {"weights": {"kind": "runtime_env", "path": "target"}}
SENT = {"ray": {"runtime_env": {"working_dir": "models/demo"}}}
PREFILL, DECODE = ({"name": role, "role": role, "model": "demo"} for role in ("prefill", "decode"))


def cluster(**parts: Any) -> dict[str, Any]:
    return {"models": [MODEL], "pools": [PREFILL, DECODE], **parts}


def test_pools_become_services_with_all_their_settings(tmp_path: Path) -> None:
    defaults = {"settings": {"dtype": "float32"}, "resources": {"limits": {"cpu": "1500m"}}}
    pools = [PREFILL, DECODE | {"replicas": 2, "settings": {"threads": 3}, "resources": {"requests": {"cpu": 2}}}]
    services = Cluster.model_validate(cluster(workers=defaults, pools=pools)).worker_services("redis://here", tmp_path)
    assert [service.name for service in services] == ["prefill-0", "decode-0", "decode-1"]
    assert [service.module for service in services] == ["services.prefill", "services.decode", "services.decode"]
    assert [service.threads for service in services] == [1, 3, 3]
    assert [service.resources for service in services] == [{"cpu": 1.5}, {"cpu": 2}, {"cpu": 2}]
    assert services[2].settings == {
        "model_path": Path("models/demo/target").resolve(), "model_name": "tandem-demo", "redis_url": "redis://here",
        "dtype": "float32", "threads": 3, "worker_id": "decode-1", "crash_dir": tmp_path / "crashes",
        "metrics_port": 0,
    }  # fmt: skip


def test_a_model_that_ray_brings_is_named_within_what_it_brings(tmp_path: Path) -> None:
    made = Cluster.model_validate(cluster(models=[BROUGHT], **SENT))
    services = made.worker_services("redis://here", tmp_path)
    assert {service.settings["model_path"] for service in services} == {Path("target")}


def test_workers_without_a_cpu_resource_share_the_machine(tmp_path: Path) -> None:
    services = Cluster.model_validate(cluster()).worker_services("redis://here", tmp_path)
    assert [service.settings["shared_cores"] for service in services] == [tmp_path / "cores"] * 2
    assert [service.threads for service in services] == [max(1, usable_cpus() // 2)] * 2


def test_ranks_of_workers_without_a_cpu_resource_share_the_machine(tmp_path: Path) -> None:
    pools = [PREFILL | {"settings": {"tensor_parallel": 2}}, DECODE | {"replicas": 2}]
    made = Cluster.model_validate(cluster(pools=pools))
    services = made.worker_services("redis://here", tmp_path)
    assert [service.settings.get("tensor_parallel") for service in services] == [2, None, None]
    part = max(1, usable_cpus() // 4)
    assert [service.threads for service in services] == [2 * part, part, part]
    assert [pool.text for pool in made.pools] == ["1 prefill (TP 2)", "2 decode"]


@pytest.mark.parametrize(
    ("ranks", "cpu", "reserved", "threads"), [(1, "500m", 0.5, 1), (2, "500m", 2, 2), (2, 6, 6, 6)]
)
def test_a_cpu_resource_is_at_least_a_core_a_rank(
    tmp_path: Path, ranks: int, cpu: Any, reserved: float, threads: int
) -> None:
    pool = DECODE | {"settings": {"tensor_parallel": ranks}, "resources": {"requests": {"cpu": cpu}}}
    (service,) = Cluster.model_validate(cluster(pools=[pool])).worker_services("redis://here", tmp_path)
    assert (service.resources, service.threads, service.settings["threads"]) == ({"cpu": reserved}, threads, threads)


def test_gateways_are_told_the_aliases_that_models_name() -> None:
    two = [MODEL | {"aliases": {"fast": 0.9}}, MODEL | {"id": "o", "name": "other", "aliases": {"fast": "fallback"}}]
    pools = [DECODE, DECODE | {"name": "others", "model": "o"}]
    (gateway,) = Cluster.model_validate(cluster(models=two, pools=pools)).gateway_services("redis://here")
    assert gateway.settings["aliases"] == {"fast": {"tandem-demo": 0.9, "other": "fallback"}}
    for wrong, said in (({"fast": -1}, "must be above 0"), ({"fa st": 1}, "is no name"), ({"fast": "no"}, "aliases")):
        with pytest.raises(ValidationError, match=said):
            Cluster.model_validate(cluster(models=[MODEL | {"aliases": wrong}]))


@pytest.mark.parametrize(
    ("said", "seconds"), [("stop", 300), ({"stop": "10m"}, 600), ({"stop": 90}, 90), ({"stop": "1.5h"}, 5400)]
)  # fmt: skip
def test_a_model_may_stop_when_it_is_idle(said: Any, seconds: float) -> None:
    made = Cluster.model_validate(cluster(models=[MODEL | {"idle": said}], awake={"models": 1, "memory": "2GiB"}))
    (model,) = made.on_demand
    assert model.idle is not None
    assert model.idle.stop == seconds
    assert (made.awake.models, made.awake.memory) == (1, 2 * 2**30)


def test_gateways_of_all_models_have_ports_that_count_up() -> None:
    two = [MODEL, MODEL | {"id": "other", "name": "other"}]
    pools = [DECODE, DECODE | {"name": "others", "model": "other"}]
    made = Cluster.model_validate(
        cluster(models=two, pools=pools, gateway={"replicas": 2, "settings": {"http_port": 9000}})
    )
    gateways = made.gateway_services("redis://here")
    assert [(one.name, one.settings["http_port"]) for one in gateways] == [("gateway-0", 9000), ("gateway-1", 9001)]
    assert {"model_path", "model_name"}.isdisjoint(gateways[0].settings)
    assert made.expected("other") == {"decode_workers": 1, "linked_pairs": 0}
    assert made.addresses()["--grpc-port of gateway-1"] == ("127.0.0.1", 50052)


def test_gateways_with_ports_of_their_own_share_the_others() -> None:
    made = Cluster.model_validate(
        cluster(gateway={"replicas": 2, "settings": {"http_port": 9000, "own_http_port": 9100}})
    )
    ports = [[g.settings[f"{name}_port"] for name in ("http", "grpc", "own_http")] for g in made.gateway_services("")]
    assert ports == [[9000, 50051, 9100], [9000, 50051, 9101]]
    assert len(made.addresses()) == 1 + 2 + 2, "Redis, two shared ports, and one of each process"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grpc_port": 81, "own_http_port": 81}, "--own-http-port of gateway-0: 81 is --grpc-port of gateway-0, too"),
        ({"grpc_port": 82, "own_http_port": 81}, "--own-http-port of gateway-1: 82 is --grpc-port of gateway-0, too"),
        ({"http_port": 6380}, "--http-port of gateway-0: 6380 is --redis-port, too"),
    ],
)  # fmt: skip
def test_ports_that_meet_are_named(settings: dict[str, int], words: str) -> None:
    made = Cluster.model_validate(cluster(gateway={"replicas": 2, "settings": settings}))
    with pytest.raises(ValueError, match="is --") as raised:
        made.addresses()
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"pools": [PREFILL | {"role": "both"}, DECODE]}, "pools.0.role: Input should be 'prefill' or 'decode'"),
        ({"pools": [DECODE | {"replica": 2}]}, "pools.0.replica: Extra inputs are not permitted"),
        ({"pools": [DECODE | {"model": "demi"}]}, "pools.decode.model: 'demi' is not an id of models: demo"),
        ({"pools": [DECODE, DECODE]}, "pools: decode is there twice"),
        ({"pools": [PREFILL]}, "pools: no decode pool has model demo"),
        ({"pools": [DECODE | {"name": "gateway-a"}]}, "pools.gateway-a.name: begins as one of gateway, kvstore"),
        ({"workers": {"resources": {"limits": {"cpu": "2 cores"}}}}, "'2 cores' is not a quantity such as 2, 500m"),
        ({"models": [MODEL | {"weights": {"kind": "claim", "path": "x"}}]}, "models.0.weights.kind: Input should be"),
        ({"security": {"secret": "a"}}, "security.secret: Extra inputs are not permitted"),
        ({"models": [BROUGHT]}, "models.demo.weights.kind: runtime_env needs ray.runtime_env.working_dir"),
        ({"models": [BROUGHT], "ray": {"runtime_env": {"working_dir": 1}}}, "needs ray.runtime_env.working"),
        (
            {"models": [MODEL | {"weights": {"kind": "runtime_env", "path": "../target"}}], **SENT},
            "models.demo.weights.path: ../target is not within ray.runtime_env.working_dir",
        ),
        (
            {"models": [MODEL | {"weights": {"kind": "download", "url": "s3://bucket/model"}}]},
            "download: url must be hf:",
        ),
        (
            {"models": [MODEL | {"weights": {"kind": "download", "url": "org/it", "path": "it"}}]},
            "download: url must be",
        ),
        ({"models": [MODEL | {"weights": {"url": "org/it"}}]}, "models.0.weights: baked: a path is needed"),
        ({"models": [MODEL | {"idle": "start"}]}, "models.0.idle: Input should be"),
        ({"models": [MODEL | {"idle": {"stop": "soon"}}]}, "models.0.idle.stop: Input should be a valid number"),
        ({"models": [MODEL | {"idle": {"stop": 0}}]}, "models.0.idle.stop: Input should be greater than 0"),
        (
            {
                "models": [MODEL | {"idle": "stop"}, MODEL | {"id": "b"}],
                "pools": [DECODE, DECODE | {"name": "d", "model": "b"}],
            },
            "models.demo.idle: tandem-demo is two models",
        ),
        ({"awake": {"models": 0}}, "awake.models: Input should be greater than or equal to 1"),
        ({"nodes": 3}, "nodes: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_is_named(parts: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster(**parts)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"cluster\.yaml: ") as raised:
        read_cluster(file)
    assert words in str(raised.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_cluster(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("pools: [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.yaml"):
        read_cluster(tmp_path / "broken.yaml")
    with pytest.raises(ValidationError):
        Cluster.model_validate(None)


def test_a_setting_that_no_worker_has_is_named() -> None:
    settings = {"kv_memmory": "1GiB", "dtype": "float32", "block_size": 0}
    with pytest.raises(ValueError, match=r"pools\.decode\.settings\.kv_memmory: Extra inputs are not") as raised:
        check_settings([("pools.decode.settings", settings)], WorkerSettings)
    assert "pools.decode.settings.block_size: Input should be greater than or equal to 1" in str(raised.value)


def test_a_cluster_on_a_given_redis_has_a_namespace_of_its_own(tmp_path: Path) -> None:
    def of(redis: dict[str, str], **settings: object) -> set[object]:
        made = Cluster.model_validate(cluster(redis=redis, gateway={"settings": settings}))
        services = [*made.worker_services("redis://x", tmp_path), *made.gateway_services("redis://x")]
        return {service.settings.get("namespace") for service in [*services, made.kvstore_service()]}

    given = {"url": "redis://elsewhere"}
    (first,), (again,), (second,) = of(given), of(given), of(given, http_port=8001)
    assert first == again != second
    assert of(given | {"namespace": "told"}) == {"told"}
    assert of({}) == {None}
