"""The `tandem` command where a locale knows ASCII alone."""

from __future__ import annotations

import os
import subprocess
import sys

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
ECHO = """
import sys
from tandem import cli

cli._run = lambda: print(sys.argv[1], input(), "\\udcff", sys.argv[1] == "mod\\xe8le")
cli.main()
"""


def test_words_beyond_ascii_are_taken_and_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ECHO, "modèle"], input="Grüße".encode(), capture_output=True, env=os.environ | ASCII
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == rb"mod\xe8le Gr\xfc\xdfe \udcff True" + b"\n"


def test_another_locale_keeps_its_own() -> None:
    code = 'import sys; from tandem import cli; cli._run = lambda: print("\\xe9"); cli.main()'
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout == b"\xe9\n"
