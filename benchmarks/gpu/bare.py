"""`python3 benchmarks/gpu/bare.py BUNDLE`: on a machine with a GPU and no network, what it can say, smallest first.

    install ─> device ─> transports ─> engine ─> cluster ─> benchmarks.gpu: engine, transfer, serving ─> vLLM's version

Each has a bound, and its result lies in a file before the next one begins: NN-name.json, and NN-name.log as it comes.
Needs nothing but Python before it has installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TAIL = 4000


class Errand(NamedTuple):
    name: str
    command: Sequence[str]
    limit_s: float
    needed: bool = False  # without it no other says anything


def stages(bundle: Path, site: Path, out: Path) -> list[Errand]:
    python, wheels = sys.executable, sorted(map(str, whole(bundle)))
    pip = [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    tests = [python, "-m", "pytest", "-q", "-rs", "-x", "-p", "no:cacheprovider"]
    measure = [python, "-m", "benchmarks.gpu"]
    up = f"{python} -m tandem up -d --sample 'import '; rc=$?; {python} -m tandem down; exit $rc"
    versions = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0))"
    return [
        Errand("install", [*pip, f"--target={site}", *wheels], 240, needed=True),
        Errand("device", [python, "-c", versions], 60, needed=True),
        Errand("transports", [*tests, "tests/gpu/test_transports.py"], 150),
        Errand("engine", [*tests, "tests/gpu/test_engine.py"], 240),
        Errand("cluster", ["sh", "-c", up], 180),
        *(
            Errand(f"gpu-{part}", [*measure, f"--only={part}", f"--out={out / f'gpu-{part}.json'}"], limit_s)
            for part, limit_s in (("engine", 240), ("transfer", 120), ("serving", 420))
        ),
        Errand("vllm", [python, "-c", "import vllm; print(vllm.__version__)"], 120),
    ]


def whole(bundle: Path) -> list[Path]:
    """Wheels of all parts, those that were cut put together."""
    wheels = list(bundle.glob("part*/*.whl"))
    for first in bundle.glob("part*/*.whl.0"):
        joined = bundle / first.stem
        pieces = sorted(bundle.glob(f"part*/{first.stem}.*"), key=lambda path: int(path.suffix[1:]))
        joined.write_bytes(b"".join(path.read_bytes() for path in pieces))
        wheels.append(joined)
    return wheels


def run(todo: Sequence[Errand], out: Path, environment: Mapping[str, str]) -> dict[str, int | str]:
    """Exit status by stage, or why there is none."""
    out.mkdir(parents=True, exist_ok=True)
    found = dict[str, int | str]()
    for number, stage in enumerate(todo):
        log = out / f"{number:02d}-{stage.name}.log"
        started = time.monotonic()
        found[stage.name] = status = _status(stage, log, environment)
        result = {
            "stage": stage.name, "status": status, "seconds": round(time.monotonic() - started, 1),
            "tail": log.read_text(errors="replace")[-TAIL:],
        }  # fmt: skip
        (out / f"{number:02d}-{stage.name}.json").write_text(json.dumps(result, indent=1))
        print(f"{stage.name}: {status} after {result['seconds']} s", flush=True)
        if stage.needed and status != 0:
            break
    return found


def _status(stage: Errand, log: Path, environment: Mapping[str, str]) -> int | str:
    with log.open("w") as written:
        try:
            done = subprocess.run(
                stage.command, cwd=ROOT, env=dict(environment), stdout=written, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=stage.limit_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not done in {stage.limit_s:g} s"
        except OSError as error:
            return f"not begun: {error}"
    return done.returncode


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 benchmarks/gpu/bare.py BUNDLE  (results go to $OUT, or benchmarks/out/bare)")
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "out" / "bare").resolve()
    site = ROOT / ".run" / "gpu-site"
    path = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python"), str(site), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TANDEM_DEVICE": "cuda", "TANDEM_KV_MEMORY": "1GiB"}
    found = run(stages(Path(sys.argv[1]).resolve(), site, out), out, environment)
    raise SystemExit(any(found.values()))


if __name__ == "__main__":
    main()
