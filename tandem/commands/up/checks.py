"""Refuses what would fail later before anything starts, and names the option or the line of the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tandem.cluster import Cluster, Model, check_settings
from tandem.commands.up.models import check_name
from tandem.commands.up_options import UpSettings
from tandem.local import check_free
from tandem.security import check_exposed


def check(settings: UpSettings, cluster: Cluster) -> None:
    """Raises ValueError: what is wrong."""
    for model in cluster.models:
        _check_model(settings, cluster, model)
    if settings.file is not None:
        _check_settings(cluster)
    if settings.detach and settings.ray and cluster.on_demand:
        raise ValueError(
            f"models.{cluster.on_demand[0].id}.idle: with --ray --detach nobody is left who would start it"
        )
    gateway = cluster.gateway.settings
    check_exposed(gateway.get("host", "127.0.0.1"), gateway.get("api_keys"), bool(gateway.get("insecure")))
    if not (settings.detach and settings.ray):
        check_free(cluster.addresses())
    if not settings.ray:
        _check_logs(settings.logs)


def _check_logs(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--logs: {folder.absolute()}: {error.strerror}") from None


def _check_model(settings: UpSettings, cluster: Cluster, model: Model) -> None:
    option, folder = "--model" if settings.model else "--model-path", model.weights.path
    name = f"models.{model.id}.weights.path" if settings.file else option
    if model.weights.kind == "runtime_env":
        if not settings.ray:
            raise ValueError(f"models.{model.id}.weights.kind: runtime_env is Ray's; add --ray")
        brought = Path(cluster.ray.runtime_env["working_dir"])
        if not brought.is_dir():
            return  # a zip elsewhere, which only the workers open
        folder = brought / folder
    if model.weights.kind == "download":
        check_name(model.weights)
        return
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: {folder} is no Hugging Face folder: it has no config.json")


def _check_settings(cluster: Cluster) -> None:
    from services.gateway import GatewaySettings
    from tandem.worker import WorkerSettings

    check_settings([(f"pools.{pool.name}.settings", pool.settings) for pool in cluster.pools], WorkerSettings)
    check_settings([("gateway.settings", cluster.gateway.settings)], GatewaySettings)
