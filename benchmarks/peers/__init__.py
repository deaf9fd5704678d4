"""Servers beside which Tandem is measured, each started in an environment of its own. All of benchmarks may enter."""

from benchmarks.peers.environments import PeerUnavailable
from benchmarks.peers.gguf_file import opened
from benchmarks.peers.measured import (
    MeasuredPeer,
    by_url,
    known,
    llama_cpp,
    of_tandem,
    serving_of_vllm,
    started,
    tandem,
    vllm,
)

__all__ = [
    "MeasuredPeer", "PeerUnavailable", "by_url", "known", "llama_cpp", "of_tandem", "opened", "serving_of_vllm",
    "started", "tandem", "vllm",
]  # fmt: skip
