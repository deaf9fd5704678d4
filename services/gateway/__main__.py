"""`python -m services.gateway`: HTTP/SSE and gRPC in, tokens out."""

import uvloop

from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from tandem import telemetry
from tandem.settings import load


def main() -> None:
    settings = load(GatewaySettings, program="python -m services.gateway")
    traces = telemetry.set_up("tandem-gateway", f"gateway-{settings.http_port}", settings.log_level)
    try:
        uvloop.run(serve(settings))
    except (OSError, ValueError) as error:
        raise SystemExit(f"gateway: {error}") from error
    finally:
        traces.close()


if __name__ == "__main__":
    main()
