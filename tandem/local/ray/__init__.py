"""A cluster on Ray: each service an actor, which Ray places, restarts and ends. Commands may enter.

    driver ── Service ──> actor ──(worker: in its own process | gateway, kvstore: a child process)──> gRPC, KV links

Ray starts a killed actor again, or one whose node is gone, as a new incarnation; peers notice by its lease. An actor is
drained before it is removed. Tokens and KV never pass through Ray, and only this folder imports Ray. Without Ray
installed, importing this folder raises ConnectionError.
"""

try:
    import ray as ray
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ConnectionError(
        "Ray is not installed here: pip install 'tandem[ray]'; `tandem ps` lists the clusters that run without it"
    ) from None

from tandem.local.ray.actor import ActorState, service_address, store_address
from tandem.local.ray.head import connect
from tandem.local.ray.launcher import RayLauncher, kvstore_on_ray

__all__ = ["ActorState", "RayLauncher", "connect", "kvstore_on_ray", "service_address", "store_address"]
