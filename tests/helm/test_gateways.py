"""One gateway Deployment serves all models of a release, or each has one of its own where values say so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helm_python import HelmError

from services.gateway.settings import GatewaySettings
from tandem.cluster import Cluster
from tandem.commands.render import helm_values
from tests.helm.chart import Object, Values, containers, name_of, of_kind, render, rendered, values_of

ALIASED = "two-models"


def environment(deployment: Object) -> dict[str, str]:
    (container,) = containers(deployment["spec"]["template"])
    return {one["name"]: one.get("value", "") for one in container["env"]}


def gateways(objects: list[Object]) -> list[Object]:
    found = of_kind(objects, "Deployment")
    return [one for one in found if one["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"]


def per_model() -> Values:
    values = values_of(ALIASED)
    values["gateway"]["perModel"] = True
    for model in values["models"]:
        del model["aliases"]
    return values


def test_one_gateway_is_told_no_model_and_every_alias() -> None:
    (gateway,) = gateways(rendered(ALIASED))
    assert name_of(gateway) == "Deployment/rel-gateway"
    assert "tandem/model" not in gateway["spec"]["template"]["metadata"]["labels"]
    told = environment(gateway)
    assert "TANDEM_MODELS" not in told  # so that one that is added needs no other gateway
    aliases = json.loads(told["TANDEM_ALIASES"])
    assert aliases == {"fast": {"small": 0.9, "large.v2": 0.1}}
    assert GatewaySettings(aliases=aliases).aliases == aliases


def test_hosts_of_all_models_lead_to_it() -> None:
    ingress = next(one for one in of_kind(rendered(ALIASED), "Ingress") if one["metadata"]["name"] == "rel-gateway")
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ["small.example.com", "large.example.com"]
    backends = [rule["http"]["paths"][0]["backend"]["service"]["name"] for rule in ingress["spec"]["rules"]]
    assert backends == ["rel-gateway"] * 2
    doctors = {
        one["metadata"]["name"]: one["spec"]["containers"][0]["env"] for one in of_kind(rendered(ALIASED), "Pod")
    }
    assert set(doctors) == {"rel-doctor-small", "rel-doctor-large"}
    urls = {one["value"] for env in doctors.values() for one in env if one["name"] == "TANDEM_GATEWAY_URL"}
    assert urls == {"http://rel-gateway:8000"}


def test_each_model_has_its_own_where_values_say_so() -> None:
    objects = render(per_model())
    told = {one["metadata"]["name"]: environment(one)["TANDEM_MODELS"] for one in gateways(objects)}
    assert told == {"rel-gateway-small": '["small"]', "rel-gateway-large": '["large.v2"]'}
    hosts = {
        one["metadata"]["name"]: [rule["host"] for rule in one["spec"]["rules"]] for one in of_kind(objects, "Ingress")
    }
    assert hosts["rel-gateway-large"] == ["large.example.com"]
    assert {"rel-gateway-small", "rel-gateway-large"} <= {
        one["metadata"]["name"] for one in of_kind(objects, "Service")
    }


def test_aliases_need_one_gateway_for_all() -> None:
    values = per_model()
    values["models"][0]["aliases"] = {"fast": 1}
    with pytest.raises(HelmError, match="models: small: aliases need one gateway for all models"):
        render(values)


@pytest.mark.parametrize("aliases", [{"fast": 0}, {"fast": -1}, {"fast": "no"}, {"fa st": 1}, {"fast": 1e7}, ["fast"]])
def test_an_alias_that_gateways_would_refuse_is_refused(aliases: Any) -> None:
    values = values_of(ALIASED)
    values["models"][0]["aliases"] = aliases
    with pytest.raises(HelmError, match=r"aliases|fa st"):
        render(values)


def test_a_pool_cannot_take_the_gateways_name() -> None:
    values = values_of(ALIASED)
    values["pools"][0]["name"] = "gateway"
    with pytest.raises(HelmError, match='the name "gateway" is taken'):
        render(values)


def test_aliases_of_a_cluster_file_are_values() -> None:
    models = [
        {"id": id_, "name": id_, "weights": {"path": "models/demo/target"}, "aliases": {"fast": weight}}
        for id_, weight in (("a", 1), ("b", "fallback"))
    ]
    pools = [{"name": f"{id_}-d", "role": "decode", "model": id_} for id_ in "ab"]
    (gateway,) = gateways(render(helm_values(Cluster.model_validate({"models": models, "pools": pools}))))
    assert json.loads(environment(gateway)["TANDEM_ALIASES"]) == {"fast": {"a": 1, "b": "fallback"}}
