/* Attention over a paged cache: softmax over KEYS keys at a time, as in FlashAttention (arXiv 2205.14135).

   Keys and values are packed as panels of a weight are, open, and the same tiles multiply them. */

#pragma once
#include <math.h>
#include <stdlib.h>

#include "linear.h"
#include "model.h"

enum { KEYS = 64, TOKENS = 64, MAX_DIM = 256 }; /* TOKENS: of a piece of work */

struct room { /* one thread's */
    bf16 *q;                   /* (rows, dim) */
    float *out, *best, *total; /* (rows, dim), (rows,), (rows,) */
    _Alignas(64) bf16 keys[KEYS * MAX_DIM], values[KEYS * MAX_DIM], k[16 * MAX_DIM], v[16 * MAX_DIM];
};

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

/* Where the keys of one KV head from `first` on lie; the values are `kv_heads * block_size` tokens further. `run`: how
   many tokens up to the block's end, `count` at most. */
static inline const bf16 *context_at(const struct model *m, const bf16 *kv, const int32_t *table, int64_t head,
                                     int64_t first, int64_t count, int64_t *run) {
    const int64_t size = m->block_size, offset = first % size;
    *run = size - offset < count ? size - offset : count;
    return kv + ((table[first / size] * 2 * m->kv_heads + head) * size + offset) * m->head_dim;
}

/* Scattered blocks are too short for the CPU to see them coming. */
static void fetch_context(const struct model *m, const bf16 *kv, const int32_t *table, int64_t head, int64_t first,
                          int64_t count) {
    for (int64_t t = 0, run; t < count; t += run) {
        const bf16 *keys = context_at(m, kv, table, head, first + t, count - t, &run);
        const bf16 *values = keys + m->kv_heads * m->block_size * m->head_dim;
        for (int64_t i = 0; i < run * m->head_dim; i += 32)
            _mm_prefetch(keys + i, _MM_HINT_T1), _mm_prefetch(values + i, _MM_HINT_T1);
    }
}

struct sixteen { const bf16 *keys, *values; };

/* `count` keys and values of one KV head from `first` on: where they lie, if they are 16 of one block, else gathered in the
   room, with zeros up to 16. */
static struct sixteen sixteen_at(const struct model *m, const bf16 *kv, const int32_t *table, int64_t head, int64_t first,
                                 int64_t count, struct room *r) {
    const int64_t dim = m->head_dim, bytes = dim * sizeof(bf16), values = m->kv_heads * m->block_size * dim;
    int64_t run;
    const bf16 *from = context_at(m, kv, table, head, first, count, &run);
    if (run == 16) return (struct sixteen){from, from + values};
    for (int64_t t = 0; t < count; t += run) {
        from = context_at(m, kv, table, head, first + t, count - t, &run);
        memcpy(r->k + t * dim, from, run * bytes);
        memcpy(r->v + t * dim, from + values, run * bytes);
    }
    memset(r->k + count * dim, 0, (16 - count) * bytes);
    memset(r->v + count * dim, 0, (16 - count) * bytes);
    return (struct sixteen){r->k, r->v};
}

/* Keys first … first + count of one KV head, as panels. */
static void pack_context(const struct model *m, const bf16 *kv, const int32_t *table, int64_t head, int64_t first,
                         int64_t count, struct room *r) {
    const int64_t dim = m->head_dim;
    for (int64_t t = 0; t < count; t += 16) {
        const struct sixteen at = sixteen_at(m, kv, table, head, first + t, count - t < 16 ? count - t : 16, r);
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

/* Scores of a row (two tiles' parts of 32) become weights relative to the best score so far, of which `visible` count;
   returns what older sums are worth now. */
static float soften(const float *scores, int64_t visible, float scale, bf16 *weights, float *best, float *total) {
    __m512 score[4], mass = _mm512_setzero_ps(), high = _mm512_set1_ps(*best);
    for (int i = 0; i < 4; i++) {
        int64_t here = visible - 16 * i;
        __mmask16 seen = here >= 16 ? 0xffff : here <= 0 ? 0 : (__mmask16)((1u << here) - 1);
        score[i] = _mm512_maskz_loadu_ps(seen, scores + i / 2 * TILE_ROWS * 32 + i % 2 * 16); /* others were never computed */
        score[i] = _mm512_mul_ps(score[i], _mm512_set1_ps(scale));
        score[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score[i]);
        high = _mm512_max_ps(high, score[i]);
    }
    float top = _mm512_reduce_max_ps(high), keep = top == *best ? 1.0f : expf(*best - top);
    for (int i = 0; i < 4; i++) {
        __mmask16 seen = _mm512_cmp_ps_mask(score[i], _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        __m512 weight = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(score[i], _mm512_set1_ps(top))));
        mass = _mm512_add_ps(mass, weight);
        store16(weights + 16 * i, weight);
    }
    *best = top, *total = *total * keep + _mm512_reduce_add_ps(mass);
    return keep;
}

/* `rows` rows from `row` on over the `count` packed keys from `first` on; row n sees positions up to `at` + n / share. */
static void attend_tile(struct room *r, int64_t row, int64_t rows, int64_t dim, int64_t share, int64_t at, int64_t first,
                        int64_t count) {
    float scores[2 * TILE_ROWS * 32], sums[TILE_ROWS * 32], keep[TILE_ROWS];
    bf16 weights[TILE_ROWS * KEYS];
    for (int64_t half = 0; half * 32 < count; half++)
        read_tiles[rows]((const int32_t *)(r->q + row * dim), dim / 2, dim / 2, scores + half * TILE_ROWS * 32,
                         &(struct panel_at){(const uint32_t *)r->keys + half * 32 * dim / 2});
    for (int64_t n = 0; n < rows; n++) {
        int64_t visible = at + (row + n) / share - first + 1, i = row + n;
        keep[n] = soften(scores + n * 32, visible, 1.0f / sqrtf((float)dim), weights + n * KEYS, r->best + i, r->total + i);
    }
    for (int64_t i = 0; i < dim; i += 32) {
        read_tiles[rows]((const int32_t *)weights, KEYS / 2, (count + 15) / 16 * 8, sums,
                         &(struct panel_at){(const uint32_t *)r->values + i * KEYS / 2});
        for (int64_t n = 0; n < rows; n++)
            for (int64_t c = 0; c < 32; c += 16) {
                float *out = r->out + (row + n) * dim + i + c;
                __m512 old = first ? _mm512_loadu_ps(out) : _mm512_setzero_ps();
                _mm512_storeu_ps(out, _mm512_fmadd_ps(old, _mm512_set1_ps(keep[n]), _mm512_loadu_ps(sums + n * 32 + c)));
            }
    }
}

/* A piece of work: tokens begin … end, of the step's rows, of sequence `seq`, and the query heads of KV head `head`. */
struct part { int64_t seq, head, begin, end; };

static int64_t num_parts(const struct model *m, const struct step *s, int64_t seq) {
    return (s->starts[seq + 1] - s->starts[seq] + TOKENS - 1) / TOKENS * m->kv_heads;
}

static struct part part_at(const struct model *m, const struct step *s, int64_t piece) {
    int64_t seq = 0;
    for (int64_t here; piece >= (here = num_parts(m, s, seq)); seq++) piece -= here;
    int64_t begin = s->starts[seq] + piece / m->kv_heads * TOKENS, end = s->starts[seq + 1];
    return (struct part){seq, piece % m->kv_heads, begin, begin + TOKENS < end ? begin + TOKENS : end};
}

static inline int64_t num_keys(const struct step *s, const struct part *p) {
    return s->lengths[p->seq] - (s->starts[p->seq + 1] - p->end);
}

static void fetch_keys(const struct model *m, const struct layer *l, const struct step *s, const struct part *p, int64_t first) {
    int64_t keys = num_keys(s, p), count = keys - first < KEYS ? keys - first : KEYS;
    fetch_context(m, l->kv, s->tables + s->table_starts[p->seq], p->head, first, count);
}

/* `next`, if any, is what this thread does then. */
static void attend(const struct model *m, const struct layer *l, const struct step *s, struct room *r, const struct part *p,
                   const struct part *next) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, width = share * dim, rows = (p->end - p->begin) * share;
    const int64_t keys = num_keys(s, p), at = keys - (p->end - p->begin), tile_count = num_tiles(rows);
    for (int64_t token = p->begin; token < p->end; token++)
        memcpy(r->q + (token - p->begin) * width, s->qkv + token * (m->heads + 2 * m->kv_heads) * dim + p->head * width,
               width * sizeof *r->q);
    for (int64_t row = 0; row < rows; row++) r->best[row] = -INFINITY, r->total[row] = 0;
    for (int64_t first = 0; first < keys; first += KEYS) {
        const int64_t count = keys - first < KEYS ? keys - first : KEYS;
        if (first + KEYS < keys) fetch_keys(m, l, s, p, first + KEYS);
        else if (next) fetch_keys(m, l, s, next, 0);
        pack_context(m, l->kv, s->tables + s->table_starts[p->seq], p->head, first, count, r);
        for (int64_t t = 0; t < tile_count; t++) {
            int64_t row = rows * t / tile_count, end = rows * (t + 1) / tile_count;
            if (first <= at + (end - 1) / share) attend_tile(r, row, end - row, dim, share, at, first, count);
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < dim; i += 16)
            store16(s->attended + (p->begin + row / share) * m->heads * dim + p->head * width + row % share * dim + i,
                    _mm512_div_ps(_mm512_loadu_ps(r->out + row * dim + i), _mm512_set1_ps(r->total[row])));
}

static void attention(struct hand *h, const struct model *m, const struct layer *l, const struct step *s, struct room *r) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < s->seqs; i++) pieces += num_parts(m, s, i);
    begin(h, pieces);
    for (int64_t next, piece; (piece = take(h, &next)) >= 0;) {
        struct part now = part_at(m, s, piece), then;
        if (next >= 0) then = part_at(m, s, next);
        attend(m, l, s, r, &now, next >= 0 ? &then : 0);
    }
}

static struct room *make_room(const struct model *m, const struct step *s) {
    int64_t tokens = 1;
    for (int64_t i = 0; i < s->seqs; i++)
        if (s->starts[i + 1] - s->starts[i] > tokens) tokens = s->starts[i + 1] - s->starts[i];
    const int64_t rows = (tokens < TOKENS ? tokens : TOKENS) * (m->heads / m->kv_heads), dim = m->head_dim;
    struct room *r = aligned_alloc(64, sizeof *r);
    float *floats = malloc(rows * (dim + 2) * sizeof *floats + rows * dim * sizeof *r->q);
    r->out = floats, r->best = floats + rows * dim, r->total = r->best + rows, r->q = (bf16 *)(r->total + rows);
    return r;
}
