/* One pool of threads, torch's own, and loops whose pieces its threads share.

   Each thread begins with a share of its own, and who is done early takes work from the others: a core that another process
   borrowed for a moment holds nobody up for longer than one piece of work. */

#pragma once
#define _GNU_SOURCE
#include <immintrin.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn run_parallel;
static int (*thread_number)(void), (*num_threads)(void);


enum { MAX_THREADS = 128, SPINS = 8192 };

struct pieces { _Alignas(64) _Atomic uint64_t left; }; /* of one thread: the first in the low half, the end in the high */

struct crew {
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int32_t rounds, asleep;
    struct pieces pieces[2][MAX_THREADS]; /* of this loop and the next, in turns */
    int64_t threads;
};

struct hand { struct crew *crew; int64_t me, threads, turn; uint32_t *opened; /* room for a panel, opened */ };

/* What each thread that `run` started begins with. */
static struct hand join(struct crew *crew) {
    return crew->threads > 1 ? (struct hand){crew, thread_number(), num_threads(), 0, 0} : (struct hand){crew, 0, 1, 0, 0};
}

static void run(void (*body)(void *), void *data, struct crew *crew, int64_t threads) {
    crew->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (crew->threads > 1) run_parallel(body, data, (unsigned)crew->threads, 0);
    else body(data);
}

static void meet(const struct hand *h) {
    struct crew *c = h->crew;
    int32_t round = atomic_load(&c->rounds);
    if (atomic_fetch_add(&c->arrived, 1) + 1 == h->threads) {
        atomic_store(&c->arrived, 0);
        atomic_fetch_add(&c->rounds, 1);
        if (atomic_load(&c->asleep)) syscall(SYS_futex, &c->rounds, FUTEX_WAKE_PRIVATE, MAX_THREADS, 0, 0, 0);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&c->rounds, memory_order_acquire) == round; spins++) {
        if (spins < SPINS) {
            _mm_pause();
            continue;
        }
        /* Asleep, so that whoever keeps a thread of ours from running may come over to this core. */
        atomic_fetch_add(&c->asleep, 1);
        syscall(SYS_futex, &c->rounds, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
        atomic_fetch_sub(&c->asleep, 1);
    }
}

/* The loop before is over, for everyone; a loop of `count` pieces begins. */
static void begin(struct hand *h, int64_t count) {
    uint64_t first = count * h->me / h->threads, end = count * (h->me + 1) / h->threads;
    h->turn ^= 1;
    atomic_store(&h->crew->pieces[h->turn][h->me].left, end << 32 | first);
    if (h->threads > 1) meet(h);
}

/* The next piece: the first of one's own, then others' last ones; -1 when all are taken. `ahead`: the likely next one. */
static int64_t take(struct hand *h, int64_t *ahead) {
    for (int64_t i = 0; i < h->threads; i++) {
        _Atomic uint64_t *left = &h->crew->pieces[h->turn][(h->me + i) % h->threads].left;
        uint64_t seen = atomic_load(left);
        for (;;) {
            int64_t first = (int64_t)(seen & UINT32_MAX), end = (int64_t)(seen >> 32);
            if (first >= end) break;
            uint64_t after = i ? (uint64_t)(end - 1) << 32 | first : (uint64_t)end << 32 | (first + 1);
            if (!atomic_compare_exchange_weak(left, &seen, after)) continue;
            *ahead = end - first < 2 ? -1 : i ? end - 2 : first + 1;
            return i ? end - 1 : first;
        }
    }
    return -1;
}

