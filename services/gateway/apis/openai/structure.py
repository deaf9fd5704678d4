"""The form of an answer by vLLM's fields, which all APIs accept beside their own."""

from __future__ import annotations

from services.gateway.apis.openai.schema import HeldBody
from services.gateway.errors import InvalidRequest
from services.gateway.generation import Structure, read_structure


def structure_of(body: HeldBody, said: Structure | None) -> Structure | None:
    """Returns the form that the answer must have, by whichever of its names.

    Args:
        said: the form that the body has under its API's own name.

    Raises:
        InvalidRequest: two fields say so.
    """
    found = [said] if said else []
    if body.structured_outputs is not None:
        found.append(read_structure(body.structured_outputs, "structured_outputs"))
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found.append(Structure(kind, value, f"guided_{kind}"))
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise InvalidRequest(f"{names} say what the answer must look like: give only one of them", found[1].param)
    return found[0] if found else None
