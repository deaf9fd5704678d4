"""`python -m services.prefill`: a prefill worker."""

from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.registry import Role
from tandem.settings import load
from tandem.worker import run_worker

if __name__ == "__main__":
    run_worker(load(PrefillSettings, program="python -m services.prefill"), Role.PREFILL, PrefillWorker)
