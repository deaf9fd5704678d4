"""A service for tests: says what it was given, or too much, then ends, or stays and does not want to stop."""

import os
import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1:], [name for name in os.environ if name.startswith("TANDEM_")], flush=True)
if "--chatter" in sys.argv:
    print('{"event": "loading", "done": 3, "total": 4}', 'no "loading" of ours', '{"loading": 1}', sep="\n")
    print("x" * 3_000_000, flush=True)
if "--stay" in sys.argv:
    time.sleep(600)
raise SystemExit(3)
