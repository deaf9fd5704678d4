"""One module per `tandem` command."""

# Where `tandem up` is found unless it was told other ports.
UP_ADDRESSES = {
    "redis_url": "redis://127.0.0.1:6380",
    "gateway_url": "http://127.0.0.1:8000",
    "grpc_address": "127.0.0.1:50051",
}
