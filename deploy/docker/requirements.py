"""Prints what an image installs: the project's own dependencies and those of the extras named, one a line."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [package for extra in sys.argv[1:] for package in project["optional-dependencies"][extra]]
print("\n".join([*project["dependencies"], *extras]))
