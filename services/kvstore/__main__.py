"""`python -m services.kvstore`: the registry's keeper."""

from tandem.machine.garbage import starting
from tandem.machine.home import provide_home

if __name__ == "__main__":
    starting()
    provide_home()

import uvloop

from services.kvstore.keeper import run
from services.kvstore.settings import KVStoreSettings
from tandem.process import telemetry
from tandem.settings import load

if __name__ == "__main__":
    settings = load(KVStoreSettings, program="python -m services.kvstore")
    traces = telemetry.set_up("tandem-kvstore", f"{settings.host}:{settings.grpc_port}", settings.log_level)
    try:
        uvloop.run(run(settings))
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"kvstore: {error}") from error
    finally:
        traces.close()
