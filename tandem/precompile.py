"""Compiles Tandem's C code into the cache while an image is built: `python -m tandem.precompile`.

The machine that runs the image may have other instruction sets than the one that builds it, so a library is made for
each set that the code can use; the running machine chooses one. On arm64 torch computes everything.
"""

from __future__ import annotations

import platform

from tandem.engine import float32
from tandem.engine.kernels.build import AMX, INSTRUCTIONS, library_path
from tandem.engine.parallel.exchange import library_path as ranks_library_path
from tandem.machine import native
from tandem.transfer.copy.copier import copier_path

X86_64 = ("x86_64", "AMD64")


def main() -> None:
    native.kernels_folder().mkdir(parents=True, exist_ok=True)
    print(ranks_library_path())
    if platform.machine() not in X86_64:
        return
    print(copier_path(cpu=frozenset({"avx2"})))
    for wider in ((), float32.WIDER):
        print(float32.library_path(cpu=frozenset((*float32.INSTRUCTIONS, *wider))))
    for cpu in (INSTRUCTIONS, (*INSTRUCTIONS, *AMX)):
        print(library_path(cpu=frozenset(cpu)))


if __name__ == "__main__":
    main()
