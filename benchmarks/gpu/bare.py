"""`python3 benchmarks/gpu/bare.py BUNDLE`: on a machine with a GPU and no network, what it can say, smallest first.

    install ─> device ─> transports ─> engine ─> flashinfer ─> cluster ─> benchmarks.gpu, part by part, vLLM's last

Each has a bound, and its result is a line of bare.jsonl before the next one begins: its exit status, or why there is
none; `cannot run here`, with the reason, is no failure. bare.log has what they say as it comes, gpu-PART.json what was
measured: six files, for places that carry few back. What is installed and compiled stays, so a second call with
--only=… goes on where a first one ended. Needs nothing but Python before it has installed.
`--device=cpu` rehearses the same commands without a GPU, at a small scale, with what is installed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"  # the bundle's
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE, COMPILED = ROOT / ".run" / "gpu" / HERE / "tandem", ROOT / ".run" / "flashinfer"
PEER_VLLM = "PEER_VLLM"  # the variable that names the folder of vLLM and of its versions of libraries
TAIL, STOP_S = 4000, 45.0
CANNOT = 77  # the exit status of what cannot run here; its last line says why
CANNOT_RUN = "cannot run here"


class Errand(NamedTuple):
    name: str
    command: Sequence[str]
    limit_s: float
    needed: bool = False  # without it no other says anything


def stages(bundle: Path, site: Path, out: Path, device: str = "cuda") -> list[Errand]:
    # The machine's libraries are of other releases than those tested with: their warnings are no errors there.
    options = ["-q", "-rs", "-n0", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.skipped", "-W", "default"]
    python, tests = sys.executable, [sys.executable, "-m", "pytest", *options]
    measure = [python, "-m", "benchmarks.gpu", f"--device={device}"]
    tandem = f"{python} -m tandem"
    up = f"trap '{tandem} down --all' EXIT; trap 'exit 130' INT TERM; {tandem} up -d --sample 'import '"

    def unpacked(name: str, place: Path) -> Errand:
        needed = name == "install" and device == "cuda"
        return Errand(name, [python, __file__, f"--unpack={place}", str(bundle)], 120, needed)

    def measured(part: str, limit_s: float) -> Errand:
        return Errand(f"gpu-{part}", [*measure, f"--only={part}", f"--out={out / f'gpu-{part}.json'}"], limit_s)

    return [
        unpacked("install", site),
        Errand("device", [*measure, "--only="], 60, needed=True),
        Errand("transports", [*tests, "tests/gpu/test_transports.py"], 150),
        Errand("engine", [*tests, "tests/gpu/test_engine.py", "tests/gpu/test_tiers.py", "-k", "not flashinfer"], 240),
        # Compiles four modules, each for minutes: all at once.
        Errand("flashinfer", [*tests, "-n4", "tests/gpu/test_engine.py", "-k", "flashinfer"], 540),
        Errand("cluster", ["sh", "-c", up], 180),
        measured("engine", 240),
        measured("transfer", 120),
        measured("serving", 420),
        *([unpacked("unpack-vllm", vllm_of(site))] if parts_of(bundle, "vllm") else []),
        measured("vllm", 540),
    ]


def vllm_of(site: Path) -> Path:
    """Beside Tandem's: it has other versions of some libraries."""
    return site.with_name("vllm")


def parts_of(bundle: Path, name: str) -> list[Path]:
    return list(bundle.rglob(f"{name}.tar.xz.*-of-*"))


def unpack(bundle: Path, site: Path) -> None:
    """All parts of the archive that has the site's name, wherever in the bundle, as one; nothing where that was done.

    Raises SystemExit, naming them, where parts are missing, or are of two archives.
    """
    parts, total = dict[int, Path](), 1
    for path in parts_of(bundle, site.name):
        number, of = map(int, path.suffix[1:].split("-of-"))
        if parts and of != total:
            raise SystemExit(f"{site.name}.tar.xz: {bundle} has parts of two, of {total} and of {of}")
        parts[number], total = path, of
    if missing := [number for number in range(1, total + 1) if number not in parts]:
        raise SystemExit(f"{site.name}.tar.xz: {bundle} lacks part {', '.join(map(str, missing))} of {total}")
    packed = b"".join(parts[number].read_bytes() for number in sorted(parts))
    done, digest = site / "unpacked", sha256(packed).hexdigest()
    if done.is_file() and done.read_text(encoding="utf-8") == digest:
        return
    shutil.rmtree(site, ignore_errors=True)  # of another bundle, or half of this one
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
        archive.extractall(site, filter="data")
    done.write_text(digest, encoding="utf-8")


def run(todo: Sequence[Errand], out: Path, environment: Mapping[str, str], seconds: float) -> dict[str, int | str]:
    """Exit status by stage, or why there is none; all of them within `seconds`."""
    # A shell has what runs in its background ignore it, and what that starts: clusters would outlive their stage.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out.mkdir(parents=True, exist_ok=True)
    found, end = dict[str, int | str](), time.monotonic() + seconds
    ended: int | str = ""
    with (
        (out / "bare.log").open("ab", buffering=0) as log,
        (out / "bare.jsonl").open("a", buffering=1, encoding="utf-8") as results,
    ):
        for stage in todo:
            begun, place = time.monotonic(), log.tell()
            log.write(f"\n=== {stage.name}\n".encode())
            status = ended or _status(stage, min(stage.limit_s, end - begun), log, environment)
            took, tail = round(time.monotonic() - begun, 1), _tail(out / "bare.log", place)
            if status == CANNOT:
                status = f"{CANNOT_RUN}: {tail.strip().splitlines()[-1]}"
            found[stage.name] = status
            results.write(json.dumps({"stage": stage.name, "status": status, "seconds": took, "tail": tail}) + "\n")
            print(f"{stage.name}: {status} ({took} s)", flush=True)
            if stage.needed and status != 0:
                ended = status if is_fine(status) else f"not begun: {stage.name} failed"
    return found


def is_fine(status: int | str) -> bool:
    return status == 0 or str(status).startswith(CANNOT_RUN)


def _status(stage: Errand, limit_s: float, log: IO[bytes], environment: Mapping[str, str]) -> int | str:
    if limit_s <= 0:
        return "not begun: no time is left"
    try:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=dict(environment), stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"not begun: {error}"
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return f"not done in {limit_s:.0f} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It ends what it started, clusters too, where it can; they would hold the device's memory."""
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(STOP_S)
            return
        except subprocess.TimeoutExpired:
            continue


def _tail(log: Path, place: int) -> str:
    with log.open("rb") as written:
        written.seek(place)
        return written.read().decode(errors="replace")[-TAIL:]


def environment_of(site: Path, device: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python"), str(site), os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(Path(sys.executable).parent), str(site / "bin"), os.environ.get("PATH", "")])
    own = {"PYTHONPATH": path, "PATH": programs, "FLASHINFER_WORKSPACE_BASE": str(COMPILED), "PYTHONUNBUFFERED": "1"}
    own[PEER_VLLM] = str(vllm_of(site))
    own["XDG_STATE_HOME"] = str(site.parent / "state")  # where clusters are noted: `down` ends no other
    return os.environ | own | {"TANDEM_DEVICE": device, "TANDEM_KV_MEMORY": "1GiB" if device == "cuda" else "64MiB"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/bare.py", description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, help="folder of what `make gpu-bundle` made")
    parser.add_argument("--only", default="", help="stages, by name (default: all)")
    parser.add_argument("--seconds", type=float, default=3600, help="the most that all take together")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or ROOT / "benchmarks" / "out" / "bare")
    parser.add_argument("--unpack", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.unpack:
        if HERE != PYTHON:
            print(f"the bundle's wheels are for Python {PYTHON}, and this is {HERE}")
            raise SystemExit(CANNOT)
        unpack(options.bundle, options.unpack)
        return
    out = Path(options.out).resolve()
    todo = stages(options.bundle.resolve(), SITE, out, options.device)
    asked = options.only.split(",") if options.only else [stage.name for stage in todo]
    if unknown := set(asked) - {stage.name for stage in todo}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(stage.name for stage in todo)}")
    todo = [stage for stage in todo if stage.name in asked]
    found = run(todo, out, environment_of(SITE, options.device), options.seconds)
    raise SystemExit(not all(map(is_fine, found.values())))


if __name__ == "__main__":
    main()
