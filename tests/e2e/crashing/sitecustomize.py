"""On a worker's PYTHONPATH: prompts with certain tokens end its process in mid-step, as a bug in C would."""

import sys

if {"services.prefill", "services.decode"} & set(sys.orig_argv):
    from tests.e2e.crashing.plant import plant

    plant()
