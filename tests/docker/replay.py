"""A Dockerfile without Docker: the COPY and RUN steps of a target, carried out in a clean folder.

FROM a stage brings what that stage holds; paths of the image lie under the folder; steps of the system (apt-get) are
left out, as this machine stands for the base image. Python is this one, in a virtual environment that RUN makes; what
pip would install there is linked from this one's where it has just that version (see tests/docker/install.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
INSTALL = Path(__file__).with_name("install.py")
STEP_BOUND_S = 600.0


@dataclass
class Stage:
    """Its steps, and what they leave: files under `root`, environment, folder, user and command."""

    name: str
    parent: str
    steps: list[Any]
    root: Path = Path()
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = ""
    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)


def stages() -> tuple[dict[str, Stage], dict[str, str]]:
    """By name, and the arguments that stand before the first of them."""
    import dockerfile

    found: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    for step in dockerfile.parse_file(str(DOCKERFILE)):
        if step.cmd.upper() == "FROM":
            parent, _, name = step.value
            stage = found[name] = Stage(name, _expanded(parent, arguments), [])
        elif not found:
            name, _, default = step.value[0].partition("=")
            arguments[name] = default
        else:
            stage.steps.append(step)
    return found, arguments


class Replay:
    """Builds targets under `folder`, each stage once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stages, _ = stages()
        self._built: set[str] = set()
        self._ignored = _ignored()

    def build(self, name: str) -> Stage:
        stage = self._stages[name]
        if name in self._built:
            return stage
        stage.root = self._folder / name
        stage.root.mkdir(parents=True)
        if parent := self._stages.get(stage.parent):
            self.build(stage.parent)
            _copy(parent.root, stage.root)
            stage.environment, stage.folder = dict(parent.environment), parent.folder
            stage.user, stage.command, stage.entrypoint = parent.user, parent.command, parent.entrypoint
            # A virtual environment names its own folder.
            self._relocate(parent.root, stage.root)
        for step in stage.steps:
            getattr(self, f"_{step.cmd.lower()}")(stage, step)
        self._built.add(name)
        return stage

    def start(self, stage: Stage, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        """The image's own command."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self._words(stage, stage.command), cwd=self._at(stage, stage.folder), stdin=subprocess.DEVNULL,
                env=self._environment(stage) | environment, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, stage: Stage, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._words(stage, words), cwd=self._at(stage, stage.folder), env=self._environment(stage),
            capture_output=True, text=True, timeout=STEP_BOUND_S, check=False,
        )  # fmt: skip

    # --- steps ---

    def _copy(self, stage: Stage, step: Any) -> None:
        *sources, target = step.value
        source_root = ROOT
        for flag in step.flags:
            source_root = self.build(flag.removeprefix("--from=")).root
        into = self._at(stage, target)
        for pattern in sources:
            found = [source_root / pattern.lstrip("/")] if "*" not in pattern else sorted(source_root.glob(pattern))
            assert found, f"COPY {pattern}: there is nothing"
            for path in found:
                many = target.endswith("/") or len(found) > 1 or target == "./"
                skip = None if source_root is not ROOT else self._ignore
                assert source_root is not ROOT or not self._ignored(str(path.relative_to(ROOT))), f"{path} is ignored"
                _copy(path, into / path.name if path.is_file() and many else into, skip)
        if source_root is not ROOT:
            self._relocate(source_root, stage.root)

    def _run(self, stage: Stage, step: Any) -> None:
        install = f"{sys.executable} {INSTALL} "
        words = list(step.value) if step.json else ["sh", "-ec", step.value[0].replace("pip install ", install)]
        if not step.json and "apt-get" in step.value[0]:
            return
        done = self.run(stage, words)
        if done.returncode:
            raise AssertionError(f"{step.original}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _env(self, stage: Stage, step: Any) -> None:
        for name, value in zip(step.value[::3], step.value[1::3], strict=True):
            stage.environment[name] = re.sub(r"\$(\{WHEEL_INDEX\}|PATH)", lambda m: self._known(stage, m[1]), value)

    def _known(self, stage: Stage, name: str) -> str:
        default = os.environ["PATH"] if name == "PATH" else os.environ.get("PIP_EXTRA_INDEX_URL", "")
        return stage.environment.get(name, default)

    def _workdir(self, stage: Stage, step: Any) -> None:
        [stage.folder] = step.value
        self._at(stage, stage.folder).mkdir(parents=True, exist_ok=True)

    def _user(self, stage: Stage, step: Any) -> None:
        [stage.user] = step.value

    def _cmd(self, stage: Stage, step: Any) -> None:
        stage.command = list(step.value)

    def _entrypoint(self, stage: Stage, step: Any) -> None:
        stage.entrypoint = list(step.value)

    def _arg(self, stage: Stage, step: Any) -> None:
        """Sets an argument of the build: empty, or its default."""

    _label = _expose = _arg

    # --- paths ---

    def _at(self, stage: Stage, path: str) -> Path:
        return stage.root / (path if path.startswith("/") else f"{stage.folder}/{path}").lstrip("/")

    def _environment(self, stage: Stage) -> dict[str, str]:
        own = {name: value.replace("/app", f"{stage.root}/app") for name, value in stage.environment.items()}
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "OMP_"))}
        quick = {"PIP_NO_COMPILE": "1"}  # an image's start is not measured here
        return {"PATH": os.environ["PATH"], "HOME": str(stage.root / "tmp"), **quick, **kept, **own}

    def _words(self, stage: Stage, words: list[str]) -> list[str]:
        words = [re.sub(r"(?<![\w/])/app", f"{stage.root}/app", word) for word in words]
        python = stage.root / "app" / ".venv" / "bin" / "python"
        return [str(python if python.exists() else sys.executable), *words[1:]] if words[0] == "python" else words

    def _relocate(self, before: Path, after: Path) -> None:
        for script in [*after.glob("app/.venv/bin/*"), *after.glob("app/.venv/pyvenv.cfg")]:
            if script.is_file() and not script.is_symlink() and str(before).encode() in (text := script.read_bytes()):
                script.unlink()  # it may be the same file as the one copied from
                script.write_bytes(text.replace(str(before).encode(), str(after).encode()))
                script.chmod(0o755)

    def _ignore(self, folder: str, names: list[str]) -> set[str]:
        return {name for name in names if self._ignored(str((Path(folder) / name).relative_to(ROOT)))}


def _copy(source: Path, target: Path, ignore: Any = None) -> None:
    """Files become links where they can: nothing writes to them."""
    if source.is_dir():
        link = os.link if ignore is None else shutil.copy2
        shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True, copy_function=link)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _ignored() -> Any:
    """Docker's rules: the last that fits decides; a folder's rule is its files' too."""
    rules = [line for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def ignored(path: str) -> bool:
        parts = path.split("/")
        prefixes = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        result = False
        for rule in rules:
            pattern = rule.lstrip("!").replace("**/", "*")
            if any(
                fnmatch(prefix, pattern) or fnmatch(prefix.rpartition("/")[2], pattern.lstrip("*"))
                for prefix in prefixes
            ):
                result = not rule.startswith("!")
        return result

    return ignored


def _expanded(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], text)
