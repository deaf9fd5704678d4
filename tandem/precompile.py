"""`python -m tandem.precompile`: the C of this tree, compiled into the cache while an image is built.

A machine that runs the image may have other instructions than the one that builds it, so there is a library for each
set of them that the code asks for; which one is loaded is decided where it runs.
"""

from __future__ import annotations

from tandem.engine.kernels.build import AMX, INSTRUCTIONS, library_path
from tandem.transfer.copy.copier import copier_path


def main() -> None:
    print(copier_path(cpu=frozenset({"avx2"})))
    for cpu in (INSTRUCTIONS, (*INSTRUCTIONS, *AMX)):
        print(library_path(cpu=frozenset(cpu)))


if __name__ == "__main__":
    main()
