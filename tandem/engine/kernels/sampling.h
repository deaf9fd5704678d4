/* From a row of logits to its token, as tandem/engine/sampling/sampler.py does it, for rows whose logits need no change but
   perhaps a mask.

   max ─┬─ temperature 0 ──────────────────────────────────────────────────────> token
        └─ weights: exp((logit - max) / temperature) ─ the least one that counts ─ inverse CDF ─> token */

#pragma once
#include <math.h>
#include <stdlib.h>

#include "numbers.h"
#include "threads.h"

enum { CHUNK = 64 };

/* The parameters of a draw, as sequence.py packs them. */
struct draw { double temperature, top_p, min_p; int64_t top_k; uint64_t seed; };

struct sampling {
    float *logits;
    const uint32_t *masks; /* one bit for each logit, each row in whole words; or null */
    const struct draw *draws;
    const int64_t *indices; /* of the tokens in their answers */
    int64_t *token_ids;     /* -1: no token can be chosen */
    int64_t rows, vocab, room_floats; /* of one thread */
    float *room;
    struct team team;
};

/* SplitMix64's finalizer (Steele, Lea, Flood 2014) */
static inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* 48 bits, so that times any total it stays below that total. */
static inline double uniform(uint64_t seed, uint64_t index) {
    return (double)(mix(mix(seed + 0x9e3779b97f4a7c15) + (index + 1) * 0x9e3779b97f4a7c15) >> 16) * 0x1p-48;
}

static inline __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

static void forbid(float *x, const uint32_t *mask, int64_t count) {
    const __m512 never = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 may = (__mmask16)(mask[i / 32] >> i % 32);
        _mm512_mask_storeu_ps(x + i, ~may & first_lanes(count - i), never);
    }
}

/* The first of the largest; -1 if it is no finite number or any is NaN. */
static int64_t argmax(const float *x, int64_t count) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 wrong = 0;
    for (int64_t i = 0; i < count; i += 16) {
        __m512 here = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), first_lanes(count - i), x + i);
        wrong |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
        most = _mm512_max_ps(most, here);
    }
    const float best = _mm512_reduce_max_ps(most);
    if (wrong || !isfinite(best)) return -1;
    for (int64_t i = 0;; i += 16) {
        const __m512 here = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
        __mmask16 found = _mm512_cmp_ps_mask(here, _mm512_set1_ps(best), _CMP_EQ_OQ);
        if (found &= first_lanes(count - i)) return i + __builtin_ctz(found);
    }
}

/* Weights of all tokens, 1 for the best one, up to a whole number of chunks. */
static void weigh(const float *x, int64_t count, float best, float temperature, float *weights) {
    const __m512 scale = _mm512_set1_ps(1.0f / fmaxf(temperature, 1e-30f)), lowest = _mm512_set1_ps(-87.0f);
    for (int64_t i = 0; i < (count + CHUNK - 1) / CHUNK * CHUNK; i += 16) {
        __m512 here = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), first_lanes(count - i), x + i);
        here = _mm512_mul_ps(_mm512_sub_ps(here, _mm512_set1_ps(best)), scale);
        _mm512_storeu_ps(weights + i, _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(here, lowest, _CMP_GT_OQ), exp16(here)));
    }
}

/* What the values above `floor` come to: how many there are, or their sum. */
static double above(const float *x, int64_t count, float floor, int counted) {
    double total = 0;
    for (int64_t from = 0; from < count; from += 1024) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = from; i < count && i < from + 1024; i += 16) {
            __m512 here = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
            __mmask16 over = _mm512_mask_cmp_ps_mask(first_lanes(count - i), here, _mm512_set1_ps(floor), _CMP_GT_OQ);
            sum = _mm512_mask_add_ps(sum, over, sum, counted ? _mm512_set1_ps(1) : here);
        }
        total += _mm512_reduce_add_ps(sum);
    }
    return total;
}

/* Moves the values within (low, high] to the front; returns how many there are. */
static int64_t keep(float *x, int64_t count, float low, float high) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += 16) {
        __m512 here = _mm512_maskz_loadu_ps(first_lanes(count - i), x + i);
        __mmask16 in = _mm512_mask_cmp_ps_mask(first_lanes(count - i), here, _mm512_set1_ps(low), _CMP_GT_OQ);
        in = _mm512_mask_cmp_ps_mask(in, here, _mm512_set1_ps(high), _CMP_LE_OQ);
        _mm512_storeu_ps(x + kept, _mm512_maskz_compress_ps(in, here));
        kept += __builtin_popcount(in);
    }
    return kept;
}

static inline float between(float low, float high) {
    union { float value; int32_t bits; } a = {low}, b = {high};
    a.bits += (b.bits - a.bits) / 2;
    return a.value;
}

/* The least value above `low` such that those above it come to less than `limit`, by bisection; `x` is spoiled. Those
   above `high` come to less. */
static float least(float *x, int64_t count, float low, float high, double limit, int counted) {
    double past = 0; /* what those above `high` come to */
    count = keep(x, count, low, high);
    for (;;) {
        const float middle = between(low, high);
        if (middle == low || count < 2) break;
        const double more = above(x, count, middle, counted);
        if (past + more < limit) high = middle, past += more;
        else low = middle;
        count = keep(x, count, low, high);
    }
    return count ? x[0] : high;
}

/* The least weight that top_k, top_p and min_p keep. `room`: for as many values and 16 more. */
static float least_kept(const struct draw *d, const float *weights, int64_t count, float *room) {
    float lowest = (float)d->min_p;
    double total = 0;
    if (d->top_k > 0) {
        const int64_t k = d->top_k < count ? d->top_k : count;
        memcpy(room, weights, count * sizeof *room);
        const float last = least(room, count, 0.0f, 1.0f, (double)k, 1);
        total = above(weights, count, last, 0) + ((double)k - above(weights, count, last, 1)) * last;
        lowest = last > lowest ? last : lowest;
    } else if (d->top_p < 1) total = above(weights, count, -1.0f, 0);
    if (d->top_p < 1) {
        /* All that lie at or below this come to less than what is left out. */
        const float floor = (float)((1.0 - d->top_p) * total / (double)count * 0.999);
        memcpy(room, weights, count * sizeof *room);
        const float last = least(room, count, floor, 1.0f, d->top_p * total, 0);
        lowest = last > lowest ? last : lowest;
    }
    return lowest;
}

/* By the sums of chunks to the chunk, and in it to the token. `sums`: room for as many as there are chunks. */
static int64_t invert(const float *weights, int64_t count, float lowest, double part, double *sums) {
    const int64_t chunks = (count + CHUNK - 1) / CHUNK;
    double total = 0, target, before = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i += 16) {
            __m512 here = _mm512_loadu_ps(weights + i);
            sum = _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(here, _mm512_set1_ps(lowest), _CMP_GE_OQ), sum, here);
        }
        total += sums[chunk] = _mm512_reduce_add_ps(sum);
    }
    target = part * total;
    int64_t chunk = 0, found = -1;
    while (chunk < chunks - 1 && before + sums[chunk] <= target) before += sums[chunk++];
    for (int64_t i = chunk * CHUNK; i < (chunk + 1) * CHUNK && i < count; i++) {
        if (weights[i] < lowest || weights[i] == 0) continue;
        found = i; /* the chunk's sum may be rounded up: then it is the last one with any weight */
        if ((before += weights[i]) > target) break;
    }
    return found;
}

static int64_t sample_row(const struct sampling *s, int64_t row, float *room) {
    float *logits = s->logits + row * s->vocab;
    const struct draw *d = s->draws + row;
    if (s->masks) forbid(logits, s->masks + row * ((s->vocab + 31) / 32), s->vocab);
    const int64_t best = argmax(logits, s->vocab), padded = (s->vocab + CHUNK - 1) / CHUNK * CHUNK;
    if (best < 0 || d->temperature == 0) return best;
    float *weights = room, *spoiled = room + padded, lowest = 0;
    weigh(logits, s->vocab, logits[best], (float)d->temperature, weights);
    if (d->top_k > 0 || d->top_p < 1 || d->min_p > 0) lowest = least_kept(d, weights, s->vocab, spoiled);
    const double part = uniform(d->seed, (uint64_t)s->indices[row]);
    const int64_t found = invert(weights, s->vocab, lowest, part, (double *)spoiled);
    return found < 0 ? best : found;
}

static void sample_rows(void *data) {
    struct sampling *s = data;
    struct thread thread = join(&s->team);
    float *room = s->room + thread.me * s->room_floats;
    begin(&thread, s->rows);
    for (int64_t next, row; (row = take(&thread, &next)) >= 0;) {
        const int64_t found = sample_row(s, row, room);
        if (win(&thread, row)) s->token_ids[row] = found, written(&thread);
    }
}

/* Samples a token of each row. Returns 0, or -1 without memory. */
int64_t tandem_sample(float *logits, const uint32_t *masks, int64_t rows, int64_t vocab, const struct draw *draws,
                      const int64_t *indices, int64_t *token_ids, int64_t threads) {
    struct sampling s = {.logits = logits, .masks = masks, .draws = draws, .indices = indices,
                         .token_ids = token_ids, .rows = rows, .vocab = vocab,
                         .room_floats = (vocab * 2 + 4 * CHUNK) / 16 * 16 + 16};
    s.room = aligned_alloc(64, threads * s.room_floats * sizeof *s.room);
    _Atomic uint32_t *won = calloc(rows, sizeof *won);
    const int64_t status = s.room && won ? 0 : -1;
    if (!status) run(sample_rows, &s, &s.team, won, threads);
    free(s.room), free(won);
    return status;
}
