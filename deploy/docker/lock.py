"""`make lock`: the wheels of every image with their SHA-256, a file for each image and kind of CPU, in locks/.

pip resolves each from the project's own dependencies. An image installs what its file says and nothing else
(deploy/docker/install.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).with_name("locks")
PYTHON = "3.11"
CPUS = ("x86_64", "aarch64")
# Extras of pyproject.toml by image.
IMAGES = {
    "kvstore": [],
    "gateway": ["gateway", "tools"],
    "loader": ["loader"],
    "worker-cpu": ["worker"],
    "worker-cuda": ["worker", "gpu"],
}
OWN_INDEX = ("worker-cpu",)  # of pip's configuration, or PIP_EXTRA_INDEX_URL; all others come from PyPI
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35, 36)  # of wheels that Debian 12 takes: 2.17 and so on


def main(*images: str) -> None:
    """Those images', or all. What an index lacks leaves its file as it was, and SystemExit names it."""
    LOCKS.mkdir(exist_ok=True)
    missing = []
    for name, machine in product(images or IMAGES, CPUS):
        try:
            lines = [line_of(item) for item in resolved(IMAGES[name], machine, isolated=name not in OWN_INDEX)]
        except subprocess.CalledProcessError:
            missing.append(f"{name}-{machine}")
            continue
        (LOCKS / f"{name}-{machine}.txt").write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
        print(f"{name}-{machine}: {len(lines)} wheels")
    if missing:
        raise SystemExit(f"not resolved, for pip's reasons above: {', '.join(missing)}")


def resolved(extras: list[str], machine: str, *, isolated: bool) -> list[dict[str, Any]]:
    """pip's report of what it would install."""
    listed: list[str | Path] = [sys.executable, Path(__file__).with_name("requirements.py"), *extras]
    requirements = subprocess.run(listed, cwd=ROOT, capture_output=True, encoding="utf-8", check=True).stdout.split()
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", *(["--isolated"] if isolated else []), "install", "--dry-run", "--quiet",
            "--ignore-installed", "--only-binary=:all:", f"--target={folder}", f"--python-version={PYTHON}",
            f"--platform=manylinux2014_{machine}", *platforms, f"--report={report}", "--constraint=constraints.txt",
        ]  # fmt: skip
        subprocess.run([*command, *requirements], cwd=ROOT, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return found


def line_of(item: dict[str, Any]) -> str:
    known, digest = item["metadata"], item["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{known['name'].lower()}=={known['version']} --hash=sha256:{digest}"


if __name__ == "__main__":
    main(*sys.argv[1:])
