from tests.registry.conftest import connect, namespace, own_redis, redis, redis_server, registry

__all__ = ["connect", "namespace", "own_redis", "redis", "redis_server", "registry"]
