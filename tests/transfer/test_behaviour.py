"""The promises of every transport: the same test for each, a toy that was added by one file included."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from tandem.transfer import (
    LinkPeer,
    LinkRuntime,
    LocalPeer,
    MemoryNetwork,
    Push,
    Receiver,
    Sender,
    SocketNetwork,
    TransferError,
)
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, SOON, Meet, Pair, kv_cache, open_things, until


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scattered_blocks_arrive_bit_for_bit(meet: Meet, transport: str, dtype: torch.dtype) -> None:
    pair = meet(transport, dtype=dtype)
    there, here = [41, 3, 17, 0, 29], [9, 2, 31, 4, 0]
    pair.moves("t", there, here)
    others = [block for block in range(48) if block not in there]
    assert not any(cache[others].any() for cache in pair.cache)


def test_chunks_behind_a_cached_prefix(pair: Pair) -> None:
    there, here = [5, 6, 40, 41, 7, 8], [30, 1, 12, 3]  # blocks 0 and 1 are cached at the receiver
    outcome = pair.expect("t", there, first_block=2)
    push = pair.begin("t", 4, first_block=2)
    pair.push_all(push, 2, here[:1])
    pair.push_all(push, 3, here[1:])
    push.commit(b"first token").result(SOON)
    num_bytes = NUM_LAYERS * 4 * pair.cache[0][0].nbytes
    assert outcome.get() == ("commit", b"first token", num_bytes)
    assert push.bytes_sent == num_bytes
    assert pair.landed(there[2:], here)
    assert not any(cache[there[:2]].any() for cache in pair.cache)


def test_a_fully_cached_prompt_moves_no_block(pair: Pair) -> None:
    outcome = pair.expect("t", [1, 2], first_block=2)
    pair.begin("t", 0, first_block=2).commit(b"x").result(SOON)
    assert outcome.get() == ("commit", b"x", 0)


def test_transfers_interleave_on_one_link(pair: Pair) -> None:
    there = {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]}
    here = {"a": [0, 1, 2], "b": [10, 11, 12], "c": [20, 21, 22]}
    outcomes = {name: pair.expect(name, there[name]) for name in there}
    pushes = {name: pair.begin(name, 3) for name in there}
    for layer, kv in enumerate(pair.source):
        for name, push in pushes.items():
            push.push(layer, 0, here[name], kv)
    for push in pushes.values():
        push.commit(b"").result(SOON)
    assert all(outcomes[name].get()[0] == "commit" and pair.landed(there[name], here[name]) for name in there)


def test_a_push_that_no_longer_reads_has_copied(pair: Pair) -> None:
    """From this machine's memory it has when it returns; on a device once its queue has."""
    before = [kv.clone() for kv in pair.source]
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2)
    for layer, kv in enumerate(pair.source):
        push.push(layer, 0, [4, 5], kv)
        assert pair.transport in ("nccl", "cuda_ipc") or not push.reading
        assert until(lambda: not push.reading)
        kv.zero_()
    push.commit(b"").result(SOON)
    assert outcome.get()[0] == "commit"
    assert all(torch.equal(cache[[1, 2]], kv[[4, 5]]) for cache, kv in zip(pair.cache, before, strict=True))


def test_an_arena_of_one_frame_still_moves_everything(meet: Meet, transport: str) -> None:
    pair = meet(transport, arena_bytes=kv_cache(1)[0].nbytes)
    pair.moves("t", list(range(40)), [block % 32 for block in range(40)])


def push_for_ever(pair: Pair, end: float, pushes: list[Push]) -> None:
    """Transfers that all have to be through at `end`: as much as the transport's own buffers hold, and then no more."""
    while True:
        pushes.append(pair.begin("late", 32, seconds=end - time.monotonic()))
        pair.push_all(pushes[-1], 0, range(32))


def hold_reading(pair: Pair) -> threading.Event:
    """The receiver's end of the link reads nothing until the event is set."""
    held, reading = threading.Event(), threading.Event()

    def on_commit(_payload: bytes, _num_bytes: int) -> None:
        held.set()
        reading.wait(SOON)

    pair.receiver.expect(
        "stuck", block_ids=[], first_block=0, timeout_s=SOON, on_commit=on_commit, on_abort=lambda *_: None
    )
    pair.begin("stuck", 0).commit(b"")
    assert held.wait(SOON)
    return reading


@pytest.mark.parametrize("transport", ["shm", "tcp", "memory", "toy"])
def test_a_full_arena_blocks_push_no_longer_than_the_deadline(meet: Meet, transport: str) -> None:
    network = MemoryNetwork() if transport == "memory" else SocketNetwork(buffer_bytes=1 << 16)
    pair = meet(transport, network=network, arena_bytes=1 << 16)
    stuck = hold_reading(pair)
    pushes = list[Push]()
    with pytest.raises(TransferError, match="DEADLINE_EXCEEDED"):
        push_for_ever(pair, time.monotonic() + 0.4, pushes)
    assert not stuck.is_set()
    assert sum(push.bytes_sent for push in pushes) < 2 << 20  # buffers' worth, not 0.4 s': it did wait
    stuck.set()


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_full_arena_does_not_block_push_from_a_device(meet: Meet, transport: str) -> None:
    """Its blocks wait, unread, in their place: at most to the deadline."""
    pair = meet(transport, network=SocketNetwork(buffer_bytes=1 << 16), arena_bytes=1 << 12)
    stuck = hold_reading(pair)
    outcome, push = pair.expect("t", list(range(32)), seconds=0.5), pair.begin("t", 32, seconds=0.5)
    pair.push_all(push, 0, range(32))
    committed = push.commit(b"")
    assert push.reading
    assert push.bytes_pushed == 3 * 32 * 512 > 4 * push.bytes_sent
    with pytest.raises(TransferError, match="DEADLINE_EXCEEDED"):
        committed.result(SOON)
    assert not push.reading
    stuck.set()
    assert outcome.get()[:2] == ("abort", "DEADLINE_EXCEEDED")
    pair.moves("next", [1, 2], [6, 7])


def test_layouts_that_differ_are_refused_by_both_sides(pair: Pair) -> None:
    other = LinkPeer(DECODE.worker_id, DECODE.incarnation, "layout-b")
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*layout-a.*layout-b"):
        pair.opened(pair.sender, other)
    stranger = Sender(
        LocalPeer(LinkPeer("prefill-9", "p-9", "layout-b")),
        transports=(pair.transport,),
        runtime=LinkRuntime(pair.network),
    )  # believes, wrongly, that the receiver has its layout
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*layout-b.*layout-a"):
        pair.opened(stranger, other)
    stranger.close()


def test_another_incarnation_is_refused_by_name(pair: Pair) -> None:
    dead = LinkPeer(DECODE.worker_id, "d-0", DECODE.layout_hash)
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*d-0.*d-1"):
        pair.opened(pair.sender, dead)
    assert pair.sender.link(DECODE.worker_id, "d-0") is None


def test_nobody_at_the_address_is_unavailable(pair: Pair) -> None:
    pair.receiver.close()
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        pair.link()


def test_a_receiver_restarted_at_its_address_is_linked_anew(pair: Pair) -> None:
    old = pair.link()
    host, _, port = pair.receiver.address.rpartition(":")
    pair.receiver.close()
    reborn = LinkPeer(DECODE.worker_id, "d-2", DECODE.layout_hash)
    pair.receiver = Receiver(
        LocalPeer(reborn),
        pair.cache,
        host=host,
        port=int(port),
        transports=(pair.transport,),
        runtime=LinkRuntime(pair.network),
    )
    assert until(lambda: not old.healthy)
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*d-1.*d-2"):
        pair.link()
    link = pair.opened(pair.sender, reborn)
    assert link.healthy
    assert pair.sender.link(DECODE.worker_id, "d-2") is link
    assert pair.sender.link(DECODE.worker_id, "d-1") is None
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        old.begin("t", first_block=0, num_blocks=1, num_layers=NUM_LAYERS, timeout_s=SOON)


def test_a_link_is_opened_once_and_probed(pair: Pair) -> None:
    link = pair.link()
    assert pair.link() is link is pair.sender.link(DECODE.worker_id, DECODE.incarnation)
    assert link.transport == pair.transport
    assert 0 < link.rtt < SOON
    for num_bytes in (1, 4096, 1 << 18):
        assert 0 < link.probe(num_bytes, timeout_s=SOON).result(SOON) < SOON
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    assert not link.healthy
    assert pair.link() is not link


def test_threads_that_open_at_once_share_a_link(pair: Pair) -> None:
    links: list[object] = []
    at_once = threading.Barrier(4)

    def open_link() -> None:
        at_once.wait(SOON)
        links.append(pair.link())

    threads = [threading.Thread(target=open_link) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert links == [pair.sender.link(DECODE.worker_id, DECODE.incarnation)] * 4
    assert open_things()[1].count(f"kv-link-{DECODE.worker_id}") == 1
    pair.moves("t", [1], [2])


@pytest.mark.parametrize("step", ["begun", "one layer", "all layers", "committed"])
def test_the_sender_may_abort_at_each_step(pair: Pair, step: str) -> None:
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2)
    for layer in range({"begun": 0, "one layer": 1}.get(step, NUM_LAYERS)):
        push.push(layer, 0, [4, 5], pair.source[layer])
    committed = push.commit(b"") if step == "committed" else None
    push.abort("the client left")
    push.abort("the client left")
    ended = outcome.get()
    if committed is None:
        assert ended == ("abort", "ABORTED", "the client left")
        with pytest.raises(TransferError, match="ABORTED"):
            push.push(0, 0, [4, 5], pair.source[0])
    else:  # the commit may have been faster, which is no less right
        assert ended[0] == "commit" or ended[1] == "ABORTED"
        assert committed.done()
    pair.moves("next", [1, 2], [6, 7])
    assert outcome.silent()


@pytest.mark.parametrize("step", ["awaited", "begun", "one layer", "all layers"])
def test_a_cancelled_transfer_never_writes_again(pair: Pair, step: str) -> None:
    """Release before read: the blocks go to somebody else at once, and late frames must not touch them."""
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2) if step != "awaited" else None
    layers = {"one layer": 1, "all layers": NUM_LAYERS}.get(step, 0)
    for layer in range(layers):
        assert push is not None
        push.push(layer, 0, [4, 5], pair.source[layer])
    pair.receiver.cancel("t").result(SOON)
    for cache in pair.cache:
        cache.fill_(7.0)
    late = push or pair.begin("t", 2)
    with pytest.raises(TransferError, match=r"ABORTED|FAILED_PRECONDITION"):
        pair.finish(late, [4, 5], range(layers, NUM_LAYERS))
    pair.link().probe(1 << 16, timeout_s=SOON).result(SOON)  # all that was sent before it has been read
    assert all(bool((cache == 7.0).all()) for cache in pair.cache)
    assert outcome.silent()


def test_blocks_given_to_another_transfer_hold_only_its_bytes(pair: Pair) -> None:
    """Reassign before read."""
    first = pair.expect("first", [1, 2, 3])
    late = pair.begin("first", 3)
    pair.receiver.cancel("first").result(SOON)
    second = pair.expect("second", [3, 1, 2])
    push = pair.begin("second", 3)
    for layer, kv in enumerate(pair.source):
        push.push(layer, 0, [10, 11, 12], kv)
        with contextlib.suppress(TransferError):  # the refusal may or may not have come back yet
            late.push(layer, 0, [4, 5, 6], kv)
    with pytest.raises(TransferError, match=r"ABORTED|FAILED_PRECONDITION"):
        late.commit(b"").result(SOON)
    push.commit(b"").result(SOON)
    assert second.get()[0] == "commit"
    assert pair.landed([3, 1, 2], [10, 11, 12])
    assert first.silent()


def test_cancel_of_an_unknown_or_ended_transfer_is_no_error(pair: Pair) -> None:
    pair.receiver.cancel("never seen").result(0)
    pair.moves("t", [1], [2])
    pair.receiver.cancel("t").result(0)


def test_a_callback_may_cancel(pair: Pair) -> None:
    done = threading.Event()

    def on_commit(_payload: bytes, _num_bytes: int) -> None:
        pair.receiver.cancel("t")
        done.set()

    pair.receiver.expect(
        "t", block_ids=[], first_block=0, timeout_s=SOON, on_commit=on_commit, on_abort=lambda *_: None
    )
    committed = pair.begin("t", 0).commit(b"")
    assert done.wait(SOON)
    committed.exception(SOON)


def test_a_transfer_nobody_expects_is_refused(pair: Pair) -> None:
    push = pair.begin("unknown", 1)
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*unknown"):
        pair.finish(push, [1])
    pair.moves("t", [1], [2])


def test_only_one_sender_gets_a_transfer(pair: Pair) -> None:
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2)
    push.push(0, 0, [4, 5], pair.source[0])
    assert until(lambda: not push.reading)
    pair.link().probe(64, timeout_s=SOON).result(SOON)
    rival = Sender(
        LocalPeer(LinkPeer("prefill-1", "p-7", "layout-a")),
        transports=(pair.transport,),
        runtime=LinkRuntime(pair.network),
    )
    intruder = pair.opened(rival, DECODE)
    stolen = intruder.begin("t", first_block=0, num_blocks=2, num_layers=NUM_LAYERS, timeout_s=SOON)
    with pytest.raises(TransferError, match="FAILED_PRECONDITION"):
        pair.finish(stolen, [20, 21])
    pair.finish(push, [4, 5], [1, 2])
    assert outcome.get()[0] == "commit"
    assert pair.landed([1, 2], [4, 5])
    rival.close()


def test_only_the_sender_that_was_named_may_begin(pair: Pair) -> None:
    outcome = pair.expect("t", [1, 2], sender="p-9")
    with pytest.raises(TransferError, match="FAILED_PRECONDITION"):
        pair.finish(pair.begin("t", 2), [4, 5])
    assert outcome.silent()
    other = pair.expect("u", [3], sender=PREFILL.incarnation)
    pair.finish(pair.begin("u", 1), [6])
    assert other.get()[0] == "commit"
    pair.receiver.cancel("t")


def test_a_named_sender_that_is_lost_before_it_began_ends_its_transfers_alone(pair: Pair) -> None:
    pair.link()
    outcome, anyone = pair.expect("t", [1], sender=PREFILL.incarnation), pair.expect("any", [2])
    someone = pair.expect("other", [3], sender="p-9")
    twin = Sender(LocalPeer(PREFILL), transports=(pair.transport,), runtime=LinkRuntime(pair.network))
    pair.opened(twin, DECODE)
    twin.close()
    assert not until(lambda: not outcome.silent(), 0.2)  # it has a link still
    pair.sender.close()
    assert outcome.get()[:2] == ("abort", "UNAVAILABLE")
    assert anyone.silent()
    assert someone.silent()


def test_links_beyond_the_limit_are_refused_and_harm_no_other(meet: Meet, transport: str) -> None:
    pair = meet(transport, max_links=1)
    first = pair.link()
    rival = Sender(
        LocalPeer(LinkPeer("prefill-1", "p-7", "layout-a")), transports=(transport,), runtime=LinkRuntime(pair.network)
    )
    with pytest.raises(TransferError, match=r"RESOURCE_EXHAUSTED|UNAVAILABLE"):  # a reset may overtake the refusal
        pair.opened(rival, DECODE)
    assert first.healthy
    pair.moves("t", [1], [2])
    pair.sender.close_link(DECODE.worker_id, DECODE.incarnation)
    assert until(lambda: opens(rival, pair))
    rival.close()


def opens(sender: Sender, pair: Pair) -> bool:
    with contextlib.suppress(TransferError):
        return pair.opened(sender, DECODE).healthy
    return False


def test_sides_that_differ_on_the_blocks_fail_before_any_is_written(pair: Pair) -> None:
    outcome = pair.expect("t", [1, 2, 3], first_block=1)
    pair.begin("t", 3, first_block=0)
    assert outcome.get()[:2] == ("abort", "FAILED_PRECONDITION")


@pytest.mark.parametrize(
    ("layer", "first_block", "here"), [(NUM_LAYERS, 0, [4]), (0, 2, [4]), (0, 1, [4, 5]), (0, 0, [4, 5])]
)
def test_a_wrong_push_fails_its_own_transfer(pair: Pair, layer: int, first_block: int, here: list[int]) -> None:
    outcome = pair.expect("t", [1, 2])
    push = pair.begin("t", 2)
    push.push(0, 0, [4], pair.source[0])
    with pytest.raises(TransferError, match="FAILED_PRECONDITION"):
        push.push(layer, first_block, here, pair.source[0])
    assert outcome.get()[:2] == ("abort", "FAILED_PRECONDITION")
    pair.moves("next", [1, 2], [6, 7])


def test_a_block_id_outside_the_cache_costs_no_slot(meet: Meet, transport: str) -> None:
    pair = meet(transport, arena_bytes=kv_cache(1)[0].nbytes)
    pair.expect("t", [1])
    push = pair.begin("t", 1)
    with pytest.raises(IndexError):
        push.push(0, 0, [32], pair.source[0])
    push.abort("a bad block id")
    pair.moves("next", [1], [6])


def test_a_commit_before_the_last_push_fails(pair: Pair) -> None:
    outcome = pair.expect("t", [1])
    push = pair.begin("t", 1)
    push.push(0, 0, [4], pair.source[0])
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*2 \(layer, block\) pairs"):
        push.commit(b"")
    assert outcome.get()[0] == "abort"


def test_a_cache_of_other_blocks_is_refused(pair: Pair) -> None:
    outcome = pair.expect("t", [1])
    push = pair.begin("t", 1)
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*1024 bytes here and 512"):
        push.push(0, 0, [1], torch.zeros(4, 2, 2, 8, 8))
    assert outcome.get()[:2] == ("abort", "FAILED_PRECONDITION")


def test_expect_names_what_is_wrong(pair: Pair) -> None:
    for block_ids, first_block, field in ([1, 1], 0, "block_ids"), ([48], 0, "block_ids"), ([1], 2, "first_block"):
        with pytest.raises(ValueError, match=field):
            pair.expect("t", block_ids, first_block)
    pair.expect("t", [1])
    with pytest.raises(ValueError, match="transfer_id"):
        pair.expect("t", [2])
    pair.receiver.cancel("t")


def test_a_deadline_ends_both_sides(pair: Pair) -> None:
    """The sender may not have heard yet when it pushes; when it commits, it has to."""
    pair.link()  # which may take longer than the deadline
    outcome = pair.expect("t", [1], seconds=0.2)
    push = pair.begin("t", 1, seconds=0.2)
    assert outcome.get(1.0)[:2] == ("abort", "DEADLINE_EXCEEDED")
    with pytest.raises(TransferError, match="DEADLINE_EXCEEDED"):
        pair.finish(push, [3])


def test_a_failing_on_commit_fails_the_sender(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def on_commit(_payload: bytes, _num_bytes: int) -> None:
        raise RuntimeError("no room in the batch")

    pair.receiver.expect(
        "t", block_ids=[], first_block=0, timeout_s=SOON, on_commit=on_commit, on_abort=lambda *_: None
    )
    with pytest.raises(TransferError, match=r"ABORTED.*no room in the batch"):
        pair.begin("t", 0).commit(b"").result(SOON)
    assert "on_commit" in caplog.text or "callback" in caplog.text
    pair.moves("next", [1], [6])


def test_closing_either_side_ends_its_transfers(pair: Pair) -> None:
    outcome = pair.expect("t", [1])
    waiting = pair.expect("never begun", [2])
    push = pair.begin("t", 1)
    push.push(0, 0, [4], pair.source[0])
    pair.sender.close()
    assert outcome.get(2.0)[:2] == ("abort", "UNAVAILABLE")
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        push.push(1, 0, [4], pair.source[1])
    assert waiting.silent()
    pair.receiver.close()
    assert waiting.get(2.0)[:2] == ("abort", "UNAVAILABLE")


def test_shm_gives_way_to_tcp_where_the_receiver_will_not_have_it() -> None:
    cache = kv_cache(4)
    sender = Sender(LocalPeer(PREFILL))
    receiver = Receiver(LocalPeer(DECODE), cache, host="127.0.0.1", transports=("tcp",))
    assert sender.open_link(DECODE, receiver.address, timeout_s=SOON).result(SOON).transport == "tcp"
    sender.close()
    receiver.close()


def test_a_pair_without_a_common_transport_names_the_reasons_and_the_cure() -> None:
    sender, receiver = (
        Sender(LocalPeer(PREFILL), transports=("shm",)),
        Receiver(LocalPeer(DECODE), kv_cache(4), host="127.0.0.1", transports=("tcp",)),
    )
    with pytest.raises(TransferError, match=r"none in common \(shm: the receiver does not use it\); let both use one,"):
        sender.open_link(DECODE, receiver.address, timeout_s=SOON).result(SOON)
    sender.close()
    receiver.close()


def test_a_transport_that_the_network_cannot_carry_is_named() -> None:
    with pytest.raises(ValueError, match=r"memory.*shm.*tcp"):
        Sender(LocalPeer(PREFILL), transports=("memory",))
