/* Meetings of processes that share memory: each counts up its own line and waits until others' lines have got as far.
   A waiter spins for a while, then sleeps in the kernel until the line it waits for is counted up. */

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif
struct line { /* of one counter: a cache line */
    _Atomic uint32_t count, sleepers;
    uint32_t unused[14];
};

static int is_behind(struct line *l, uint32_t wanted) { return (int32_t)(atomic_load(&l->count) - wanted) < 0; }

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

/* Waits until the line's count is `wanted`, or more, for at most so long. Returns 0, or -1 where it is still behind. */
int64_t tandem_wait(struct line *l, uint32_t wanted, int64_t spins, int64_t timeout_us) {
    for (int64_t i = 0; i < spins; i++) {
        if (!is_behind(l, wanted)) return 0;
        PAUSE();
    }
    const int64_t end = now_us() + timeout_us;
    for (int64_t left; is_behind(l, wanted); ) {
        if ((left = end - now_us()) <= 0) return -1;
        const struct timespec most = {left / 1000000, left % 1000000 * 1000};
        atomic_fetch_add(&l->sleepers, 1);
        const uint32_t seen = atomic_load(&l->count);
        if ((int32_t)(seen - wanted) < 0) syscall(SYS_futex, &l->count, FUTEX_WAIT, seen, &most, 0, 0);
        atomic_fetch_sub(&l->sleepers, 1);
    }
    return 0;
}

/* Counts up a line and wakes those who sleep for it. Returns the new count. */
uint32_t tandem_count_up(struct line *l) {
    const uint32_t count = atomic_fetch_add(&l->count, 1) + 1;
    if (atomic_load(&l->sleepers)) syscall(SYS_futex, &l->count, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
    return count;
}

/* A rank's meetings: it arrives, and waits until all have arrived as often. `look` is called while another one is late;
   where it returns 1, waiting is in vain. */
struct meetings {
    struct line *lines;
    int64_t ranks, rank, spins, patience_us;
    int64_t (*look)(void);
};

void tandem_arrive(const struct meetings *m) { tandem_count_up(m->lines + m->rank); }

/* Waits until all ranks have arrived `met` times. Returns 0, or 1 where that is in vain. */
int64_t tandem_wait_for_all(const struct meetings *m, uint32_t met) {
    for (int64_t i = 0; i < m->ranks; i++)
        while (tandem_wait(m->lines + i, met, m->spins, m->patience_us))
            if (m->look()) return 1;
    return 0;
}
