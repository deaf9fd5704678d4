"""Settings of services, without an option of `tandem up`, from its environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from tandem.commands.up_options import UpSettings

PREFIX = "TANDEM_"
# Kubernetes sets such variables in every pod for a Service named tandem-….
OF_KUBERNETES = re.compile(r"TANDEM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)=.*")
URL_OF_KUBERNETES = re.compile(r"TANDEM_(\w+_)?PORT=(tcp|udp|sctp)://.*")
# Settings that need a value for each process, or that `tandem up` sets itself.
OF_ONE_PROCESS = {
    "worker_id", "shared_cores", "health_port", "metrics_port", "transfer_port", "redis_password",
}  # fmt: skip


def for_services(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that set services' own settings.

    Raises:
        ValueError: a variable sets nothing, or a setting that each process has its own value for.
    """
    given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    own = {name for name in given if _field(name) in UpSettings.model_fields or _is_of_kubernetes(name, given[name])}
    others = {name: value for name, value in given.items() if name not in own}
    if not others:
        return {}
    services, commands = _fields_of_services(), _fields_of_commands()
    allowed = (services | commands) - OF_ONE_PROCESS
    problems = [_refusal(name, allowed) for name in others if _field(name) not in allowed]
    if problems:
        raise ValueError("\n".join(problems))
    return {name: value for name, value in others.items() if _field(name) in services}


def _field(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


def _is_of_kubernetes(variable: str, value: str) -> bool:
    given = f"{variable}={value}"
    return bool(OF_KUBERNETES.fullmatch(given) or URL_OF_KUBERNETES.fullmatch(given))


def _refusal(variable: str, allowed: Iterable[str]) -> str:
    if _field(variable) in OF_ONE_PROCESS:
        return f"{variable}: each process needs its own, which `tandem up` or a pool of --file sets"
    nearest = get_close_matches(_field(variable), {*allowed, *UpSettings.model_fields}, n=1)
    return f"{variable}: there is no such setting" + "".join(f"; did you mean {PREFIX}{n.upper()}?" for n in nearest)


def _fields_of_services() -> set[str]:
    from services.gateway import GatewaySettings
    from services.kvstore.settings import KVStoreSettings
    from tandem.worker import WorkerSettings

    return {name for settings in (GatewaySettings, KVStoreSettings, WorkerSettings) for name in settings.model_fields}


def _fields_of_commands() -> set[str]:
    """Returns the names of settings of other commands, which may be in the environment, too."""
    from tandem.commands.doctor import DoctorSettings
    from tandem.commands.drain import DrainSettings
    from tandem.commands.generate import GenerateSettings

    return {name for settings in (DoctorSettings, DrainSettings, GenerateSettings) for name in settings.model_fields}
