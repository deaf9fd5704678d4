/* One pool of threads, torch's own, and loops whose pieces its threads share.

   Each thread begins with a share of its own; one that is done early takes pieces from the others. So a core that
   another process has borrowed delays a loop by no more than one piece. */

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

/* Of one thread, those not yet taken: the first in the low half, the end in the high. */
struct pieces { _Alignas(64) _Atomic uint64_t left; };

struct team {
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int32_t rounds, asleep;
    struct pieces pieces[2][MAX_THREADS]; /* of this loop and the next, in turns */
    int64_t threads;
};

struct thread {
    struct team *team;
    int64_t me, threads, turn;
    uint32_t *opened; /* room for a panel, opened */
    float *x_sums;    /* room for a sum of each row's groups of inputs; all threads' */
};

/* What each thread that `run` started begins with. */
static struct thread join(struct team *team) {
    if (team->threads <= 1) return (struct thread){.team = team, .threads = 1};
    return (struct thread){.team = team, .me = thread_number(), .threads = num_threads()};
}

static void run(void (*body)(void *), void *data, struct team *team, int64_t threads) {
    team->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (team->threads > 1) run_parallel(body, data, (unsigned)team->threads, 0);
    else body(data);
}

static void meet(const struct thread *thread) {
    struct team *team = thread->team;
    int32_t round = atomic_load(&team->rounds);
    if (atomic_fetch_add(&team->arrived, 1) + 1 == thread->threads) {
        atomic_store(&team->arrived, 0);
        atomic_fetch_add(&team->rounds, 1);
        if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->rounds, FUTEX_WAKE_PRIVATE, MAX_THREADS, 0, 0, 0);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&team->rounds, memory_order_acquire) == round; spins++) {
        if (spins < SPINS) {
            _mm_pause();
            continue;
        }
        /* Asleep, so that the scheduler may move here what keeps another thread of this team from running. */
        atomic_fetch_add(&team->asleep, 1);
        syscall(SYS_futex, &team->rounds, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
        atomic_fetch_sub(&team->asleep, 1);
    }
}

/* Waits until all threads have ended the loop before; a loop of `count` pieces begins. */
static void begin(struct thread *thread, int64_t count) {
    uint64_t first = count * thread->me / thread->threads, end = count * (thread->me + 1) / thread->threads;
    thread->turn ^= 1;
    atomic_store(&thread->team->pieces[thread->turn][thread->me].left, end << 32 | first);
    if (thread->threads > 1) meet(thread);
}

/* The next piece: the first of this thread's own, then the last ones of others; -1 when all are taken. `ahead`: which
   one will probably be next. */
static int64_t take(struct thread *thread, int64_t *ahead) {
    for (int64_t i = 0; i < thread->threads; i++) {
        _Atomic uint64_t *left = &thread->team->pieces[thread->turn][(thread->me + i) % thread->threads].left;
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

