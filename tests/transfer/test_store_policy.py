"""Payloads are stored as is faster where the two cores lie now, and a change is noticed."""

from __future__ import annotations

from tandem.transfer.copy.store_policy import MIN_BYTES, TRIAL, StorePolicy

NEAR, FAR = {False: 1.0, True: 1.2}, {False: 5.0, True: 0.8}  # seconds a payload takes, past the caches or not


def stores(policy: StorePolicy, seconds: dict[bool, float], count: int, num_bytes: int = MIN_BYTES) -> list[bool]:
    taken = []
    for _ in range(count):
        taken.append(policy.past_caches())
        policy.took(taken[-1], num_bytes, seconds[taken[-1]])
    return taken


def test_near_cores_share_their_caches_but_for_trials() -> None:
    policy = StorePolicy()
    stores(policy, NEAR, 4 * TRIAL)
    assert sum(stores(policy, NEAR, 10 * TRIAL)) == 10


def test_far_cores_meet_in_memory_but_for_trials() -> None:
    policy = StorePolicy()
    stores(policy, FAR, 5)
    assert sum(not past for past in stores(policy, FAR, 10 * TRIAL)) == 10


def test_cores_that_are_moved_apart_and_together_are_noticed() -> None:
    policy = StorePolicy()
    stores(policy, NEAR, 4 * TRIAL)
    assert sum(not past for past in stores(policy, FAR, TRIAL)) <= 4
    stores(policy, NEAR, 3 * TRIAL)
    assert sum(stores(policy, NEAR, TRIAL)) == 1


def test_a_payload_that_was_held_up_changes_nothing() -> None:
    policy = StorePolicy()
    stores(policy, NEAR, 4 * TRIAL)
    policy.took(False, MIN_BYTES, 100.0)
    assert not any(stores(policy, NEAR, TRIAL - 1))


def test_small_payloads_decide_nothing() -> None:
    policy = StorePolicy()
    stores(policy, FAR, 5)
    stores(policy, {False: 1.0, True: 9.0}, TRIAL // 2, num_bytes=MIN_BYTES - 1)
    assert all(stores(policy, FAR, TRIAL // 4))
