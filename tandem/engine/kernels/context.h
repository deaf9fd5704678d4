/* The keys and values of a sequence, in blocks of a cache: found, prefetched, gathered, opened or packed. */

#pragma once
#include "linear.h"
#include "kv.h"

enum { KEYS = 64, MAX_DIM = 256 };

struct room { /* one thread's */
    bf16 *q;                   /* (rows, dim) */
    float *out, *best, *total; /* (rows, dim), (rows,), (rows,) */
    _Alignas(64) bf16 keys[KEYS * MAX_DIM], values[KEYS * MAX_DIM], k[KEYS * MAX_DIM], v[KEYS * MAX_DIM];
};

/* Keys and values of one KV head: `count` tokens from `first` on. */
struct span { const int32_t *table; int64_t head, first, count; };

static inline struct span part_of(const struct span *s, int64_t begin, int64_t end) {
    return (struct span){s->table, s->head, s->first + begin, end - begin};
}

/* Where the keys from token t on lie; the values are `value_stride` further. `run`: how many tokens
   follow up to the end of the block or the span. */
static inline const char *context_at(const struct model *m, const char *kv, const struct span *s, int64_t t,
                                     int64_t *run) {
    const int64_t size = m->block_size, first = s->first + t, offset = first % size;
    *run = size - offset < s->count - t ? size - offset : s->count - t;
    return kv + s->table[first / size] * m->block_stride + (s->head * size + offset) * kv_row(m);
}

/* Scattered blocks are too short for the CPU's own prefetcher. */
static void fetch_context(const struct model *m, const char *kv, const struct span *s) {
    for (int64_t t = 0, run; t < s->count; t += run) {
        const char *keys = context_at(m, kv, s, t, &run), *values = keys + m->value_stride;
        for (int64_t i = 0; i < run * kv_row(m); i += 64)
            _mm_prefetch(keys + i, _MM_HINT_T1), _mm_prefetch(values + i, _MM_HINT_T1);
    }
}

struct sixteen { const bf16 *keys, *values; };

/* A span of at most 16 tokens: where it lies if it is 16 of one block and no int8, else gathered in `k` and `v`, with
   zeros up to 16. */
static struct sixteen sixteen_at(const struct model *m, const char *kv, struct span s, bf16 *k, bf16 *v) {
    const int64_t dim = m->head_dim, bytes = dim * sizeof(bf16), values = m->value_stride;
    int64_t run;
    const char *from = s.count ? context_at(m, kv, &s, 0, &run) : 0;
    if (from && run == 16 && !m->kv_int8) return (struct sixteen){(const bf16 *)from, (const bf16 *)(from + values)};
    for (int64_t t = 0; t < s.count; t += run) {
        from = context_at(m, kv, &s, t, &run);
        read_rows(m, from, run, k + t * dim);
        read_rows(m, from + values, run, v + t * dim);
    }
    memset(k + s.count * dim, 0, (16 - s.count) * bytes);
    memset(v + s.count * dim, 0, (16 - s.count) * bytes);
    return (struct sixteen){k, v};
}

/* ---- packed ---- */

static void transpose16(const uint32_t *from, int64_t stride, uint32_t *to, int64_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2)
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int n = 0; n < 2; n++)
            a[i + 2 * n] = _mm512_unpacklo_epi64(b[i + n], b[i + n + 2]),
            a[i + 2 * n + 1] = _mm512_unpackhi_epi64(b[i + n], b[i + n + 2]);
    for (int half = 0; half < 16; half += 8)
        for (int n = 0; n < 4; n++)
            b[half + n] = _mm512_shuffle_i32x4(a[half + n], a[half + n + 4], 0x88),
            b[half + n + 4] = _mm512_shuffle_i32x4(a[half + n], a[half + n + 4], 0xdd);
    for (int n = 0; n < 8; n++) {
        _mm512_storeu_si512(to + n * to_stride, _mm512_shuffle_i32x4(b[n], b[n + 8], 0x88));
        _mm512_storeu_si512(to + (n + 8) * to_stride, _mm512_shuffle_i32x4(b[n], b[n + 8], 0xdd));
    }
}

static void pack_context(const struct model *m, const char *kv, const struct span *s, struct room *r) {
    const int64_t dim = m->head_dim;
    for (int64_t t = 0; t < (s->count + 31) / 32 * 32; t += 16) { /* zeros up to a multiple of 32 */
        const int64_t begin = t < s->count ? t : s->count, end = t + 16 < s->count ? t + 16 : s->count;
        const struct sixteen at = sixteen_at(m, kv, part_of(s, begin, end), r->k, r->v);
        for (int64_t pair = 0; pair < dim / 2; pair += 16)
            transpose16((const uint32_t *)at.keys + pair, dim / 2,
                        (uint32_t *)r->keys + t / 32 * 32 * dim / 2 + pair * 32 + t % 32, 32);
        for (int64_t pair = 0; pair < 8; pair++)
            for (int64_t i = 0; i < dim; i += 16) {
                const bf16 *v = at.values + 2 * pair * dim + i;
                __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)v));
                __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(v + dim)));
                uint32_t *to = (uint32_t *)r->values + i / 32 * 32 * (KEYS / 2) + (t / 2 + pair) * 32 + i % 32;
                _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
    }
}
