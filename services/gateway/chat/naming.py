"""Names of fields in errors: those of the API that a client speaks, not those of the chat that its body became."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.gateway.errors import InvalidRequest


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in an error. `names`: the API's names, or parts of them, by a chat's."""
    try:
        yield
    except InvalidRequest as error:
        message, param = error.message, error.param
        for theirs, ours in names.items():
            if param and theirs in param:
                message, param = message.replace(theirs, ours, 1), param.replace(theirs, ours, 1)
        raise InvalidRequest(message, param, error.code) from None
