"""`python -m services.prefill`: a prefill worker."""

from tandem.machine.garbage import starting
from tandem.machine.home import provide_home

if __name__ == "__main__":
    starting()
    provide_home()

from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.registry import Role
from tandem.settings import load
from tandem.worker import run_worker

if __name__ == "__main__":
    run_worker(load(PrefillSettings, program="python -m services.prefill"), Role.PREFILL, PrefillWorker)
