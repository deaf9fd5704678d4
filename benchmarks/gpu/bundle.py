"""`python -m benchmarks.gpu.bundle`: wheels for a machine with a GPU, torch and Python 3.12, but no network.

tandem.tar.xz.1-of-1       what Tandem's PYTHONPATH gets there, in parts that are carried beside the repository
vllm.tar.xz.1-of-2, …      vLLM's, to compare with; its kernels are for one kind of GPU (`--capability`) alone
there                      python3 benchmarks/gpu/bare.py build/gpu-bundle
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.gpu.bare import PYTHON, parts_of
from benchmarks.gpu.machine_code import only_for
from benchmarks.gpu.wheels import TANDEM, THERE, VLLM, Site

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu-bundle"
# The repository has 22 MiB more, and both together are to fit into 64.
PART_MIB = 40
SITES = {site.name: site for site in (TANDEM, VLLM)}
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bundle", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", choices=SITES, help="one archive (default: all)")
    parser.add_argument("--part-mib", type=int, default=PART_MIB, help="the most of a part")
    parser.add_argument("--capability", type=int, default=90, help="the GPU's, times 10 (default: 90, Hopper)")
    options = parser.parse_args()
    out: Path = options.out
    for name in [options.only] if options.only else SITES:
        for part in parts_of(out, name):
            part.unlink()
        filled(SITES[name], folder := out / name, options.capability)
        packed = pack(folder, out / f"{name}.tar.xz")
        shutil.rmtree(folder)
        for part in cut(packed, options.part_mib << 20):
            print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB", flush=True)


def filled(site: Site, folder: Path, capability: int) -> None:
    """Installs the site's wheels, less what is left out of them. Raises SystemExit where one more is needed."""
    install(requirements(site, (ROOT / "constraints.txt").read_text(encoding="utf-8")), folder)
    if lacking := lacks(site, folder):
        raise SystemExit(f"{', '.join(sorted(lacking))} is needed: carry it, or see that it is there")
    for path in {path for pattern in site.left_out for path in folder.glob(pattern)}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in folder.rglob("*.so"):
        library = bytearray(path.read_bytes())
        if only_for(capability, library):
            path.write_bytes(library)


def requirements(site: Site, constraints: str) -> list[str]:
    """Its wheels with their versions, from the constraints where it names none. ValueError names one that has none."""
    pinned = {_plain(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.M)}
    if missing := [name for name in site.wheels if "==" not in name and name not in pinned]:
        raise ValueError(f"constraints.txt has no version of {', '.join(missing)}")
    return [name if "==" in name else f"{name}=={pinned[name]}" for name in site.wheels]


def install(wanted: list[str], folder: Path) -> None:
    """As they are installed on that machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    options = ["-q", "--no-deps", "--no-compile", f"--target={folder}", *target]
    subprocess.run([*pip, "install", *options, *wanted], check=True, timeout=600)


def lacks(site: Site, folder: Path) -> set[str]:
    """Names of what is required by what is there, and is neither there nor on that machine."""
    found = [Parser().parsestr(path.read_text(encoding="utf-8")) for path in folder.glob("*.dist-info/METADATA")]
    lines = [line for one in found for line in one.get_all("Requires-Dist", [])]
    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "extra": ""}
    needed = {_plain(one.name) for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(there)}
    return needed - THERE - site.not_needed - {_plain(one["Name"]) for one in found}


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:xz", preset=6) as packed:
        packed.add(folder, ".")
    return archive


def cut(file: Path, most: int) -> list[Path]:
    """As FILE.1-of-2, FILE.2-of-2: of nearly one size, put together where they are unpacked."""
    packed = file.read_bytes()
    total = -(-len(packed) // most)
    size = -(-len(packed) // total)
    parts = [file.with_name(f"{file.name}.{number}-of-{total}") for number in range(1, total + 1)]
    for number, part in enumerate(parts):
        part.write_bytes(packed[number * size : (number + 1) * size])
    file.unlink()
    return parts


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
