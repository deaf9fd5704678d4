"""`python install.py IMAGE EXTRA...`, while an image is built: exactly the wheels of its lock, each by its SHA-256.

Where no lock is for this kind of CPU, the versions of constraints.txt are installed, and a line says so.
"""

import platform
import subprocess
import sys
from pathlib import Path

image, *extras = sys.argv[1:]
lock = Path(f"locks/{image}-{platform.machine()}.txt")
if lock.exists():
    what = ["--require-hashes", "--no-deps", f"--requirement={lock}"]
else:
    print(f"{lock} is not there: wheels are taken by version, not by hash", flush=True)
    listed = subprocess.run(
        [sys.executable, "requirements.py", *extras], capture_output=True, encoding="utf-8", check=True
    )
    what = ["--constraint=constraints.txt", *listed.stdout.split()]
subprocess.run([sys.executable, "-m", "pip", "install", *what], check=True)
