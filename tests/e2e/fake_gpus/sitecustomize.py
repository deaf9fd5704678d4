"""On a worker's PYTHONPATH: its transports for GPUs run over fakes. Nothing of the product knows."""

import sys

if {"services.prefill", "services.decode"} & set(sys.orig_argv):
    from tests.transfer.peer import fake_gpus

    fake_gpus()
