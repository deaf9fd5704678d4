"""The choice of a model for a request that names an alias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.model.followed import FollowedNames
from tandem.aliases import Alias, Targets
from tandem.registry import NamedList

SESSION = "x-session-id"
MAX_USER_LENGTH = 1024
# Fields of a body that identify its user or conversation; the first present one counts.
USER_FIELDS = ("user", "safety_identifier", "prompt_cache_key", "conversation", "metadata")


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """The model and user that a body names; None and "" if it names none."""

    model: Any = None
    user: str = ""
    streamed: bool = False

    @classmethod
    def of(cls, fields: Any) -> ModelAsked:
        """Returns them from a body's fields, which may be anything."""
        if not isinstance(fields, dict):
            return cls()
        users = (_user(fields.get(name)) for name in USER_FIELDS)
        user = next(filter(None, users), "")[:MAX_USER_LENGTH]
        return cls(fields.get("model"), user, fields.get("stream") is True)


@dataclass(frozen=True, slots=True)
class Via:
    """How an alias led a request to its model."""

    alias: str
    model: str  # or adapter; "" if none of the alias has workers
    lacking: str = ""  # the models without workers that this one is the fallback for
    left: str = ""  # the model that had the request before and lost its workers

    @property
    def reason(self) -> str:
        """The reason to show in responses; "" if weights alone decided."""
        if self.lacking:
            return f"fallback of {self.alias}: no workers of {self.lacking}"
        return f"{self.alias}: {self.left} has lost its workers" if self.left else ""


class ServedAliases(FollowedNames[Alias]):
    """The aliases of the registry and, after them, of the gateway's settings."""

    def __init__(self, kept: NamedList[Alias], settings: Callable[[], Mapping[str, Targets]]) -> None:
        super().__init__(kept)
        self._settings = settings

    @property
    def is_empty(self) -> bool:
        return not (self._known.by_name or self._settings())

    @property
    def names(self) -> list[str]:
        return sorted({*self._known.by_name, *self._settings()})

    def find(self, name: str) -> Alias | None:
        if (known := super().find(name)) is not None:
            return known
        targets = self._settings().get(name)
        return Alias(name, targets) if targets else None


def choose(alias: Alias, user: str, serves: Callable[[str], bool], known: Callable[[str], bool]) -> Via:
    """
    Args:
        serves: True if a model has workers.
        known: True if it had workers recently, which may restart.
    """
    found = alias.choose(user, serves) or alias.choose(user, known)
    if found is None:
        return Via(alias.name, "")
    return Via(alias.name, found, "" if found in alias.weights else ", ".join(alias.weights))


def _user(said: Any) -> str:
    """Returns the id in a conversation or in Anthropic's metadata; "" if there is none."""
    if isinstance(said, dict):
        said = said.get("id") or said.get("user_id")
    return said if isinstance(said, str) else ""
