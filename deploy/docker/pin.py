"""`make pin`: the images that ours are built on, by digest, in the Dockerfile. A release begins with it.

skopeo asks each registry what the tag names now: an index of images, one for each kind of CPU. Its digest is put behind
the tag, which stays there for those who read it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

DOCKERFILE = Path(__file__).with_name("Dockerfile")
BASES = re.compile(r"^(ARG (?:BASE|CUDA_IMAGE)=)([^@\s]+)(@sha256:[0-9a-f]{64})?$", re.MULTILINE)
CPUS = {"amd64", "arm64"}


def main(file: Path = DOCKERFILE) -> None:
    text = BASES.sub(lambda found: f"{found[1]}{found[2]}@{digest_of(found[2])}", file.read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
    print("\n".join("".join(line) for line in BASES.findall(text)))


def digest_of(image: str) -> str:
    """The index's. SystemExit says why there is none."""
    asked = ["skopeo", "inspect", "--raw", f"docker://{image}"]
    done = subprocess.run(asked, capture_output=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{image}: {done.stderr.decode().strip()}")
    offered = {one["platform"]["architecture"] for one in json.loads(done.stdout).get("manifests", ())}
    if missing := CPUS - offered:
        raise SystemExit(f"{image}: there is none for {', '.join(sorted(missing))}")
    return f"sha256:{sha256(done.stdout).hexdigest()}"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
