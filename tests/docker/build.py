"""Images built and run by buildah in a chroot, which needs no daemon.

The base is the Dockerfile's own where a registry has it, else Debian with its Python, from its archive. pip is told
what it is told here: certificates, indices, folders of wheels.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
NAME = "localhost/tandem-test"
STEP_BOUND_S = 1200.0
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# A user that no image knows, as OpenShift chooses them.
ANYBODY = "54321:0"
# For the program behind the folder: what a container is given, and nothing else that it may write to.
READ_ONLY = """
mount --make-rprivate /
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -o remount,bind,ro "$1"
shift
exec "$@"
"""
PLACES = ("cert", "extra-index-url", "find-links", "index-url")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", timeout=STEP_BOUND_S, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def base(folder: Path) -> str:
    """Name of an image with Python 3.11, made in `folder`, once on a machine, if no registry is reached."""
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    own = "docker.io/library/" + next(line for line in lines if line.startswith("ARG BASE=")).partition("=")[2]
    if subprocess.run(["buildah", "pull", own], capture_output=True, timeout=300, check=False).returncode == 0:
        return own
    if run("buildah", "images", "--quiet", "--filter", f"reference={NAME}/base").strip():
        return f"{NAME}/base"
    run("apt-get", "download", "debootstrap", cwd=folder)
    run("dpkg", "-x", next(folder.glob("debootstrap_*.deb")), folder / "tool")
    root, tool = folder / "root", folder / "tool" / "usr"
    run(
        "env", f"DEBOOTSTRAP_DIR={tool}/share/debootstrap", tool / "sbin" / "debootstrap", "--variant=minbase",
        "--include=ca-certificates,python3,python3-venv", "bookworm", root,
    )  # fmt: skip
    (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
    for waste in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*Packages")):
        waste.unlink()
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "--quiet", container, root, "/")
    run("buildah", "commit", "--quiet", "--rm", container, f"{NAME}/base")
    shutil.rmtree(root)
    return f"{NAME}/base"


def build(target: str, on: str, folder: Path) -> str:
    """The image's name. This old buildah follows no ARG to a stage: its default is put there."""
    dockerfile, conf, said = folder / "Dockerfile", folder / "pip.conf", pip_options()
    dockerfile.write_text(DOCKERFILE.read_text(encoding="utf-8").replace("-${ACCELERATOR}", "-cpu"), encoding="utf-8")
    conf.write_text(
        "\n".join(["[global]", *(f"{name} = {value}" for name, value in said.items())]) + "\n", encoding="utf-8"
    )
    index = [f"--build-arg=WHEEL_INDEX={said['extra-index-url']}"] if "extra-index-url" in said else []
    places = {word.removeprefix("file://").removesuffix("/simple") for value in said.values() for word in value.split()}
    mounted = [f"--volume={path}:{path}:ro" for path in sorted(places | {CERTIFICATES}) if Path(path).exists()]
    run(
        "buildah", "build", "--isolation=chroot", "--layers", f"--build-arg=BASE={on}", *index, *mounted,
        f"--volume={conf}:/etc/pip.conf:ro", f"--ignorefile={DOCKERFILE}.dockerignore", f"--file={dockerfile}",
        f"--target={target}", f"--tag={NAME}/{target}", ROOT,
    )  # fmt: skip
    return f"{NAME}/{target}"


def command_of(container: str, variables: Mapping[str, str]) -> list[str]:
    """Runs the container's own command as ANYBODY, with a read-only root and a /tmp, as a pod of the chart does."""
    root = run("buildah", "mount", container).strip()
    config = json.loads(run("buildah", "inspect", container))["OCIv1"]["config"]
    environment = [*config["Env"], *(f"{name}={value}" for name, value in variables.items())]
    return [
        "unshare", "--mount", "--", "sh", "-ec", READ_ONLY, "sh", root, "chroot", f"--userspec={ANYBODY}", root,
        "env", "-i", "-C", config["WorkingDir"], *environment, *config["Entrypoint"], *config["Cmd"],
    ]  # fmt: skip


def pip_options() -> dict[str, str]:
    """Places that pip's configuration here names."""
    lines = [line.partition("=") for line in run("pip", "config", "list").splitlines()]
    said = {name.rpartition(".")[2]: value.strip("'") for name, _, value in lines}
    return {name: said[name] for name in PLACES if name in said}


def compressed_bytes(image: str, folder: Path) -> int:
    """Size of its layers as a registry keeps them."""
    archive, counted, total = folder / "image.tar", folder / "layer.gz", 0
    run("buildah", "push", "--quiet", image, f"docker-archive:{archive}")
    with tarfile.open(archive) as layers:
        for member in layers:
            if member.isfile() and member.name.endswith(".tar") and (layer := layers.extractfile(member)):
                with gzip.open(counted, "wb", compresslevel=6) as output:
                    shutil.copyfileobj(layer, output)
                total += counted.stat().st_size
    archive.unlink()
    return total
