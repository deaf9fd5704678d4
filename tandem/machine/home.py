"""Folders of the process's user, who may have no home, no writable home, and no name.

$XDG_CACHE_HOME, else ~/.cache           what can be recreated: kernels, fetched models
$XDG_STATE_HOME, else ~/.local/state     which clusters run
<temporary folder>/tandem-<uid>          in place of a home that is missing or not writable
"""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from getpass import getuser
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Returns the folder of that name in Tandem's cache; it may not exist yet."""
    return _folder("XDG_CACHE_HOME", ".cache", name)


def state_folder(name: str) -> Path:
    """Returns the folder of that name in Tandem's state; it may not exist yet."""
    return _folder("XDG_STATE_HOME", ".local/state", name)


def provide_home() -> None:
    """Sets a home and a user in this process's environment, and so in its children's, if they are missing.

    Without them libraries fail, or write to a folder named ~.
    """
    if _home() is None:
        os.environ["HOME"] = str(_in_place_of_home())
    try:
        getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["USER"] = f"uid-{os.getuid()}"


def _folder(variable: str, below_home: str, name: str) -> Path:
    if given := os.environ.get(variable):
        return Path(given) / "tandem" / name
    home = _home()
    if home is None or not _can_write(home / below_home / "tandem" / name):
        home = _in_place_of_home()
    return home / below_home / "tandem" / name


def _home() -> Path | None:
    """Returns the user's home; None if it is unknown, does not exist, or is a root folder of another user."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    is_own = os.path.isdir(home) and home != Path("/")
    return home if is_own or _can_write(home) else None


def _can_write(folder: Path) -> bool:
    """True if the folder is writable, or can be made."""
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    return os.access(there, os.W_OK | os.X_OK)


@cache
def _in_place_of_home() -> Path:
    """Returns a folder that no other user can write to: kernels are loaded from it."""
    place = Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        said = place.lstat()
        if stat.S_ISDIR(said.st_mode) and said.st_uid == os.getuid() and not said.st_mode & 0o022:
            return place
    except OSError:
        pass  # another user's file has this name
    return Path(tempfile.mkdtemp(prefix="tandem-home-"))
