"""`pip install ARGUMENTS` for a virtual environment whose `pip` comes first in PATH, without unpacking it all again.

pip resolves the requirements; what this Python has installed in just that version is then linked, file by file, and
only the rest is installed by pip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main(arguments: list[str]) -> None:
    report = Path("report.json")
    subprocess.run(["pip", "install", "--dry-run", "--quiet", "--report", report, *arguments], check=True)
    wanted = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    report.unlink()
    missing = [f"{name}=={version}" for name, version in sorted((w["name"], w["version"]) for w in wanted)
               if not _linked(name, version)]  # fmt: skip
    if missing:
        subprocess.run(["pip", "install", "--no-deps", *missing], check=True)


def _linked(name: str, version: str) -> bool:
    """Links a package that is installed here in this version; True if it could."""
    try:
        here = distribution(name)
    except PackageNotFoundError:
        return False
    if here.version != version or not here.files:
        return False
    prefix, target = Path(sys.prefix).resolve(), Path(str(shutil.which("pip"))).parents[1]
    for file in here.files:
        source = Path(str(here.locate_file(file))).resolve()
        if source.suffix != ".pyc":
            _link(source, target / source.relative_to(prefix), prefix, target)
    return True


def _link(source: Path, target: Path, prefix: Path, new_prefix: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.parent == new_prefix / "bin":  # its first line names its Python
        target.write_bytes(source.read_bytes().replace(str(prefix).encode(), str(new_prefix).encode()))
        target.chmod(0o755)
        return
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


if __name__ == "__main__":
    main(sys.argv[1:])
