"""A service that dies in mid-step, of the signal that it is told."""

import os
import sys
import time
from pathlib import Path
from uuid import uuid4

from tandem.crash_page import CrashPage, page_path

if __name__ == "__main__":
    said = dict(option.removeprefix("--").split("=", 1) for option in sys.argv[1:])
    page = CrashPage.at(page_path(Path(said["crash-dir"]), "tandem", said["worker-id"]))
    page.begin(uuid4().hex)
    page.enter("a", 4)
    page.enter("b", 0)
    page.stepping()
    os.kill(os.getpid(), int(said["dies"]))
    time.sleep(60)
