"""`python -m services.decode`: a decode worker."""

from tandem.machine.garbage import starting
from tandem.machine.home import provide_home

if __name__ == "__main__":
    starting()
    provide_home()

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from tandem.registry import Role
from tandem.settings import load
from tandem.worker import run_worker

if __name__ == "__main__":
    run_worker(load(DecodeSettings, program="python -m services.decode"), Role.DECODE, DecodeWorker)
