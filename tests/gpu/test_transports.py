"""Two processes on one GPU move blocks over cuda_ipc, and over NCCL where each says it is another host."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch

from tandem.transfer import LocalPeer, Receiver, Sender
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, Outcome, kv_cache

BOUND_S = 60.0


def play_decode(pipe: Connection, transport: str) -> None:
    """Lands one transfer in blocks 1 and 2 and answers with their bytes."""
    os.environ |= {"NCCL_HOSTID": "decode", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
    cache = [torch.zeros_like(layer, device="cuda") for layer in kv_cache(48)]
    receiver, outcome = Receiver(LocalPeer(DECODE), cache, host="127.0.0.1", transports=(transport,)), Outcome()
    receiver.expect(
        "t", block_ids=[1, 2], first_block=0, timeout_s=BOUND_S,
        on_commit=outcome.on_commit, on_abort=outcome.on_abort,
    )  # fmt: skip
    pipe.send(receiver.address)
    pipe.send(outcome.get(BOUND_S)[0])
    pipe.send([layer[[1, 2]].cpu().numpy() for layer in cache])
    pipe.recv()
    receiver.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_blocks_arrive_bit_for_bit(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="needs cupy: the extra gpu")
    for name, value in (("HOSTID", "prefill"), ("SOCKET_IFNAME", "lo"), ("MNNVL_ENABLE", "0")):
        monkeypatch.setenv(f"NCCL_{name}", value)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=play_decode, args=(theirs, transport))
    process.start()
    sender = Sender(LocalPeer(PREFILL), transports=(transport,))
    try:
        assert ours.poll(BOUND_S)
        link = sender.open_link(DECODE, ours.recv(), timeout_s=BOUND_S).result(BOUND_S)
        assert link.transport == transport
        push = link.begin("t", first_block=0, num_blocks=2, num_layers=NUM_LAYERS, timeout_s=BOUND_S)
        source = [layer.cuda() for layer in kv_cache(32, seed=1)]
        for layer, kv in enumerate(source):
            push.push(layer, 0, [4, 5], kv)
        push.commit(b"").result(BOUND_S)
        assert ours.recv() == "commit"
        assert (link.carrier == "NET/Socket") == (transport == "nccl"), link.carrier
        for layer, landed in zip(source, ours.recv(), strict=True):
            assert torch.equal(layer[[4, 5]].cpu(), torch.from_numpy(landed))
        ours.send("done")
    finally:
        sender.close()
        process.join(10)
        process.kill()
