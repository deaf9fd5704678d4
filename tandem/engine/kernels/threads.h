/* One pool of threads, torch's own, and loops whose pieces its threads share.

     take      a piece: of this thread's own share, then of others'; then one that another has taken and not won yet
     win       true for the first that has computed it, into room of its own: it alone may write the result
     written   it has

   Another process may borrow a thread's core in the middle of a piece. Nobody waits for it: a piece's result is the same
   on any thread, so one that takes longer than pieces do is computed again. The late thread has read what may have
   changed meanwhile, wins nothing, and passes over the loops that are done. What it reads stays where it is, for a pass
   ends when all threads have ended it. */

#pragma once
#define _GNU_SOURCE
#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn run_parallel;
static int (*thread_number)(void), (*num_threads)(void);

enum { MAX_THREADS = 128, SPINS = 8192, NAP_NS = 50000 };
enum { PIECE_BITS = 20, LOOP_AT = 2 * PIECE_BITS, PIECES = 1 << PIECE_BITS };

/* One thread's. `left`: its pieces not yet taken: from the low bits up the first one, the end, and of which loop; of a
   loop before, it has all of them. `written`: how many it has won and written in all loops. */
struct share { _Alignas(64) _Atomic uint64_t left, written; };

struct team {
    struct share shares[MAX_THREADS];
    _Atomic uint32_t *won; /* of each piece, the last loop in which it was won; 0 before */
    int64_t threads;
};

struct thread {
    struct team *team;
    int64_t me, threads, count; /* count: pieces of this loop */
    uint64_t loop, sum;         /* sum: pieces of all loops up to this one */
    uint64_t since, lasted;     /* in ticks: when it took its piece, and how long the one before took */
    uint32_t *opened;           /* room for a panel, opened */
    void *result;               /* room for a piece's */
    float *x_sums;              /* room for a sum of each row's groups of inputs; all threads' */
    uint32_t met;               /* how many meetings of ranks are behind it */
};

/* What each thread that `run` started begins with. */
static struct thread join(struct team *team) {
    if (team->threads <= 1) return (struct thread){.team = team, .threads = 1};
    return (struct thread){.team = team, .me = thread_number(), .threads = num_threads()};
}

/* `won`: zeros, one for each piece of the longest loop. */
static void run(void (*body)(void *), void *data, struct team *team, _Atomic uint32_t *won, int64_t threads) {
    team->threads = threads < MAX_THREADS ? threads : MAX_THREADS, team->won = won;
    if (team->threads > 1) run_parallel(body, data, (unsigned)team->threads, 0);
    else body(data);
}

#ifdef STALLS /* for tests: a thread loses its core now and then */
static void stall(const struct thread *thread) {
    const uint64_t dice = (__rdtsc() >> 4) * 0x9e3779b97f4a7c15 >> 40;
    if (thread->threads > 1 && dice % STALLS == 0)
        nanosleep(&(struct timespec){0, (long)(dice / STALLS % 16) * NAP_NS}, 0);
}
#else
static inline void stall(const struct thread *thread) { (void)thread; }
#endif

/* A loop of `count` pieces, PIECES at most, begins, and no thread takes one before the loop before is written. */
static void begin(struct thread *thread, int64_t count) {
    thread->loop++, thread->count = count, thread->sum += (uint64_t)count;
}

static int is_written(const struct thread *thread) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < thread->threads; i++)
        sum += atomic_load_explicit(&thread->team->shares[i].written, memory_order_acquire);
    return sum >= thread->sum;
}

/* The next piece that was taken and is not won for longer than a piece takes; -1 when the loop is written. */
static int64_t take_again(const struct thread *thread) {
    const int64_t first = thread->count * thread->me / thread->threads;
    const uint64_t began = __rdtsc(), patience = thread->lasted + thread->lasted / 4;
    for (int64_t spins = 0; !is_written(thread); spins++) {
        _mm_pause();
        if (__rdtsc() - began < patience) continue;
        for (int64_t i = 0; i < thread->count; i++) {
            const int64_t piece = (first + i) % thread->count;
            if (atomic_load(thread->team->won + piece) < thread->loop) return piece;
        }
        /* Its winner lost its core as it wrote: asleep, so that the scheduler may move it here. */
        if (spins > SPINS) nanosleep(&(struct timespec){0, NAP_NS}, 0);
    }
    return -1;
}

/* The first piece of this thread's own share, or the last one of others'; -1 when all are taken. */
static int64_t take_new(const struct thread *thread, int64_t *ahead) {
    for (int64_t i = 0; i < thread->threads; i++) {
        const int64_t whose = (thread->me + i) % thread->threads;
        _Atomic uint64_t *left = &thread->team->shares[whose].left;
        uint64_t seen = atomic_load(left);
        for (;;) {
            int64_t first = seen % PIECES, end = (seen >> PIECE_BITS) % PIECES;
            if (seen >> LOOP_AT > thread->loop) return -1;
            if (seen >> LOOP_AT < thread->loop)
                first = thread->count * whose / thread->threads, end = thread->count * (whose + 1) / thread->threads;
            if (first >= end) break;
            const int64_t piece = i ? end - 1 : first;
            const uint64_t after = (uint64_t)(i ? end - 1 : end) << PIECE_BITS | (uint64_t)(i ? first : first + 1);
            if (!atomic_compare_exchange_weak(left, &seen, thread->loop << LOOP_AT | after)) continue;
            *ahead = end - first < 2 ? -1 : i ? end - 2 : first + 1;
            return piece;
        }
    }
    return -1;
}

/* The next piece; -1 when the loop is written. `ahead`: which one will probably be next. */
static int64_t take(struct thread *thread, int64_t *ahead) {
    if (thread->since) thread->lasted = __rdtsc() - thread->since;
    *ahead = -1;
    int64_t piece = take_new(thread, ahead);
    if (piece < 0 && thread->threads > 1) piece = take_again(thread);
    thread->since = piece < 0 ? 0 : __rdtsc();
    stall(thread);
    return piece;
}

static int win(const struct thread *thread, int64_t piece) {
    stall(thread);
    if (thread->threads == 1) return 1;
    _Atomic uint32_t *won = thread->team->won + piece;
    uint32_t last = atomic_load(won);
    while (last < thread->loop)
        if (atomic_compare_exchange_weak(won, &last, (uint32_t)thread->loop)) return 1;
    return 0;
}

static void written(const struct thread *thread) {
    _Atomic uint64_t *mine = &thread->team->shares[thread->me].written;
    atomic_store_explicit(mine, atomic_load_explicit(mine, memory_order_relaxed) + 1, memory_order_release);
}
