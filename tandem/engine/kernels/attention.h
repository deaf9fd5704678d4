/* Attention over a paged cache: softmax over KEYS keys at a time, as in FlashAttention (arXiv 2205.14135).

   Keys and values are packed as panels of a weight are, open, and the same tiles multiply them; for a few rows, which
   decode has, they are multiplied where they lie. */

#pragma once
#include <math.h>
#include <stdlib.h>

#include "context.h"

enum { TOKENS = 64, FEW = 4 }; /* TOKENS: the tokens of a piece of work */

/* Which of `count` keys from `first` on a row of position `at` sees: `begin`, which may lie before them, to `end`. */
struct seen { int64_t begin, end; };

static inline struct seen seen_from(const struct layer *l, int64_t at, int64_t first, int64_t count) {
    const int64_t end = at + 1 - first;
    return (struct seen){l->window ? end - l->window : 0, end < count ? end : count};
}

static inline uint32_t ones_below(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* cap * tanh(x / cap) */
static inline __m512 bounded(__m512 x, float cap) {
    const __m512 one = _mm512_set1_ps(1.0f), e = exp16(_mm512_mul_ps(x, _mm512_set1_ps(2 / cap)));
    return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_div_ps(_mm512_sub_ps(e, one), _mm512_add_ps(e, one)));
}

/* Scores of a row (two tiles' parts of 32) become weights relative to the best score so far, of which `seen` count;
   returns what older sums are worth now. */
static float soften(const struct model *m, const float *scores, struct seen keys, bf16 *weights, float *best,
                    float *total) {
    __m512 score[4], mass = _mm512_setzero_ps(), high = _mm512_set1_ps(*best);
    for (int i = 0; i < 4; i++) {
        const __mmask16 seen = (__mmask16)(ones_below(keys.end - 16 * i) & ~ones_below(keys.begin - 16 * i));
        /* Scores of keys behind the last one seen were never computed. */
        score[i] = _mm512_maskz_loadu_ps(seen, scores + i / 2 * MOST_ROWS * 32 + i % 2 * 16);
        score[i] = _mm512_mul_ps(score[i], _mm512_set1_ps(m->attention_scale));
        if (m->attention_softcap > 0) score[i] = bounded(score[i], m->attention_softcap);
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

/* `rows` rows from `row` on over the `count` packed keys from `first` on; row n is of position `at` + n / share. */
static void attend_tile(const struct model *m, const struct layer *l, struct room *r, int64_t row, int64_t rows,
                        int64_t at, int64_t first, int64_t count) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads;
    _Alignas(64) float scores[2 * MOST_ROWS * 32], sums[MOST_ROWS * 32];
    _Alignas(64) bf16 weights[MOST_ROWS * KEYS];
    float keep[MOST_ROWS];
    for (int64_t half = 0; half * 32 < count; half++)
        multiply((const int32_t *)(r->q + row * dim), rows, dim / 2, dim / 2, scores + half * MOST_ROWS * 32,
                 &(struct panel_at){.open = (const uint32_t *)r->keys + half * 32 * dim / 2});
    for (int64_t n = 0; n < rows; n++) {
        const int64_t i = row + n;
        keep[n] = soften(m, scores + n * 32, seen_from(l, at + i / share, first, count),
                         weights + n * KEYS, r->best + i, r->total + i);
    }
    for (int64_t i = 0; i < dim; i += 32) {
        multiply((const int32_t *)weights, rows, KEYS / 2, (count + 31) / 32 * 16, sums,
                 &(struct panel_at){.open = (const uint32_t *)r->values + i * KEYS / 2});
        for (int64_t n = 0; n < rows; n++)
            for (int64_t c = 0; c < 32; c += 16) {
                float *out = r->out + (row + n) * dim + i + c;
                __m512 sum = _mm512_loadu_ps(sums + n * 32 + c);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_loadu_ps(out), _mm512_set1_ps(keep[n]), sum));
            }
    }
}

/* ---- few rows ---- */

static inline __m512 add_halves(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

static inline __m512 add_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* The products of q with 16 keys. */
static inline __m512 dots16(const bf16 *q, const bf16 *keys, int64_t dim) {
    __m512 four[4]; /* keys, in each lane */
    _Pragma("GCC unroll 4") for (int n = 0; n < 4; n++, keys += 4 * dim) {
        __m512 sum[4];
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) sum[i] = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 32) {
            const __m512bh a = (__m512bh)_mm512_loadu_si512(q + d);
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
                sum[i] = _mm512_dpbf16_ps(sum[i], a, (__m512bh)_mm512_loadu_si512(keys + i * dim + d));
        }
        const __m512d a = (__m512d)add_halves(sum[0], sum[1]), b = (__m512d)add_halves(sum[2], sum[3]);
        four[n] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    return add_lanes(add_lanes(four[0], four[1]), add_lanes(four[2], four[3]));
}

/* out = out keep + weights values: 32 columns, of `rows` rows; two tokens a step. */
static inline __attribute__((always_inline)) void add_values(const struct sixteen *at, int64_t count, int64_t dim,
                                                             int64_t column, const int rows, const bf16 *weights,
                                                             const float *keep, float *out) {
    /* Where unpacking has left the columns: four of each eight in the first sum. */
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 sum[FEW][2];
    _Pragma("GCC unroll 4") for (int n = 0; n < rows; n++) sum[n][0] = sum[n][1] = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += 2) {
        const bf16 *v = at[t / 16].values + t % 16 * dim + column;
        const __m512i a = _mm512_loadu_si512(v), b = _mm512_loadu_si512(v + dim);
        const __m512bh v0 = (__m512bh)_mm512_unpacklo_epi16(a, b), v1 = (__m512bh)_mm512_unpackhi_epi16(a, b);
        _Pragma("GCC unroll 4") for (int n = 0; n < rows; n++) {
            int32_t two;
            memcpy(&two, weights + n * KEYS + t, sizeof two);
            const __m512bh w = (__m512bh)_mm512_set1_epi32(two);
            sum[n][0] = _mm512_dpbf16_ps(sum[n][0], w, v0), sum[n][1] = _mm512_dpbf16_ps(sum[n][1], w, v1);
        }
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < rows; n++) {
        float *to = out + n * dim + column;
        const __m512 old = _mm512_set1_ps(keep[n]);
        const __m512 a = _mm512_permutex2var_ps(sum[n][0], low, sum[n][1]);
        const __m512 b = _mm512_permutex2var_ps(sum[n][0], high, sum[n][1]);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), old, a));
        _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), old, b));
    }
}

/* All rows, FEW at most, over the keys `now`, while those of `then` are on their way; row n is of position `at` +
   n / share. */
static void attend_few(const struct model *m, const struct layer *l, struct room *r, int64_t rows, int64_t at,
                       const struct span *now, const struct span *then) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, count = now->count, groups = (count + 15) / 16;
    float scores[2 * MOST_ROWS * 32], keep[FEW];
    bf16 weights[FEW * KEYS];
    struct sixteen from[KEYS / 16];
    for (int64_t g = 0; g < groups; g++) {
        const struct span ahead = part_of(then, then->count * g / groups, then->count * (g + 1) / groups);
        fetch_context(m, l->kv, &ahead);
        const struct span here = part_of(now, g * 16, g + 1 < groups ? g * 16 + 16 : count);
        from[g] = sixteen_at(m, l->kv, here, r->k + g * 16 * dim, r->v + g * 16 * dim);
        float *to = scores + g / 2 * MOST_ROWS * 32 + g % 2 * 16;
        for (int64_t n = 0; n < rows; n++) _mm512_storeu_ps(to + n * 32, dots16(r->q + n * dim, from[g].keys, dim));
    }
    for (int64_t n = 0; n < rows; n++)
        keep[n] = soften(m, scores + n * 32, seen_from(l, at + n / share, now->first, count),
                         weights + n * KEYS, r->best + n, r->total + n);
    for (int64_t i = 0; i < dim; i += 32)
        switch (rows) {
        case 1: add_values(from, count, dim, i, 1, weights, keep, r->out); break;
        case 2: add_values(from, count, dim, i, 2, weights, keep, r->out); break;
        case 3: add_values(from, count, dim, i, 3, weights, keep, r->out); break;
        default: add_values(from, count, dim, i, FEW, weights, keep, r->out);
        }
}

/* A piece of work: tokens begin ... end, of the step's rows, of sequence `seq`, and the query heads of KV head `head`.
*/
struct part { int64_t seq, head, begin, end; };

static int64_t num_parts(const struct model *m, const struct step *s, int64_t seq) {
    return (s->starts[seq + 1] - s->starts[seq] + TOKENS - 1) / TOKENS * m->kv_heads;
}

static struct part part_at(const struct model *m, const struct step *s, int64_t piece) {
    int64_t seq = s->seqs == s->rows ? piece / m->kv_heads : 0; /* of one token each: no need to look for it */
    piece -= seq * m->kv_heads;
    for (int64_t here; piece >= (here = num_parts(m, s, seq)); seq++) piece -= here;
    int64_t begin = s->starts[seq] + piece / m->kv_heads * TOKENS, end = s->starts[seq + 1];
    return (struct part){seq, piece % m->kv_heads, begin, begin + TOKENS < end ? begin + TOKENS : end};
}

static inline int64_t num_keys(const struct step *s, const struct part *p) {
    return s->lengths[p->seq] - (s->starts[p->seq + 1] - p->end);
}

/* The first key of the first block that any of the part's tokens sees. Nothing before it may be read: its table entries
   and blocks may be gone. */
static inline int64_t first_key(const struct model *m, const struct layer *l, const struct step *s,
                                const struct part *p) {
    const int64_t seen = num_keys(s, p) - (p->end - p->begin) + 1 - l->window;
    return l->window && seen > 0 ? seen / m->block_size * m->block_size : 0;
}

/* Returns the span of the part's keys from `first` on: up to a multiple of KEYS, or as many as there are. */
static inline struct span keys_of(const struct layer *l, const struct step *s, const struct part *p,
                                  int64_t first) {
    const int64_t keys = num_keys(s, p), end = (first / KEYS + 1) * KEYS;
    const int32_t *tables = l->window ? s->near_tables : s->tables;
    return (struct span){tables + s->table_starts[p->seq], p->head, first, (end < keys ? end : keys) - first};
}

/* Computes part `p` in the room. `next`, if any, is this thread's next part: its first keys are fetched with the last
   keys of `p`. */
static void attend(const struct model *m, const struct layer *l, const struct step *s, struct room *r,
                   const struct part *p, const struct part *next) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, width = share * dim;
    const int64_t tokens = p->end - p->begin, rows = tokens * share;
    const int64_t keys = num_keys(s, p), at = keys - tokens, tile_count = num_tiles(rows);
    for (int64_t token = p->begin; token < p->end; token++)
        memcpy(r->q + (token - p->begin) * width, s->qkv + token * (m->heads + 2 * m->kv_heads) * dim + p->head * width,
               width * sizeof *r->q);
    for (int64_t row = 0; row < rows; row++) {
        r->best[row] = l->sinks ? wide(l->sinks[p->head * share + row % share]) : -INFINITY;
        r->total[row] = l->sinks ? 1 : 0;
    }
    memset(r->out, 0, rows * dim * sizeof *r->out);
    for (int64_t first = first_key(m, l, s, p), end; first < keys; first = end) {
        struct span now = keys_of(l, s, p, first), then = {0};
        end = first + now.count;
        if (end < keys) then = keys_of(l, s, p, end);
        else if (next) then = keys_of(l, s, next, first_key(m, l, s, next));
        if (rows <= FEW) {
            attend_few(m, l, r, rows, at, &now, &then);
            continue;
        }
        fetch_context(m, l->kv, &then);
        pack_context(m, l->kv, &now, r);
        for (int64_t t = 0; t < tile_count; t++) {
            const int64_t row = tile_begin(rows, t, tile_count), behind = tile_begin(rows, t + 1, tile_count);
            const struct seen first_row = seen_from(l, at + row / share, first, now.count);
            if (first > at + (behind - 1) / share || first_row.begin >= now.count) continue;
            attend_tile(m, l, r, row, behind - row, at, first, now.count);
        }
    }
}

static void put_attended(const struct model *m, const struct step *s, const struct room *r, const struct part *p) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, width = share * dim;
    const int64_t stride = m->attended.of ? m->attended.of : m->heads * dim;
    bf16 *out = s->attended + m->attended.first + p->head * width;
    for (int64_t row = 0; row < (p->end - p->begin) * share; row++)
        for (int64_t i = 0; i < dim; i += 16)
            store16(out + (p->begin + row / share) * stride + row % share * dim + i,
                    _mm512_div_ps(_mm512_loadu_ps(r->out + row * dim + i), _mm512_set1_ps(r->total[row])));
}

static void attention(struct thread *thread, const struct model *m, const struct layer *l, const struct step *s,
                      struct room *r) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < s->seqs; i++) pieces += num_parts(m, s, i);
    begin(thread, pieces);
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        struct part now = part_at(m, s, piece), then;
        if (next >= 0) then = part_at(m, s, next);
        attend(m, l, s, r, &now, next >= 0 ? &then : 0);
        if (win(thread, piece)) put_attended(m, s, r, &now), written(thread);
    }
}

/* What one thread's room takes: the struct, then its rows. */
static int64_t room_bytes(const struct model *m, const struct step *s, int64_t *rows) {
    int64_t tokens = 1;
    for (int64_t i = 0; i < s->seqs; i++)
        if (s->starts[i + 1] - s->starts[i] > tokens) tokens = s->starts[i + 1] - s->starts[i];
    *rows = (tokens < TOKENS ? tokens : TOKENS) * (m->heads / m->kv_heads);
    *rows = (*rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    return sizeof(struct room) + *rows * ((m->head_dim + 2) * sizeof(float) + m->head_dim * sizeof(bf16));
}

static struct room *room_at(void *bytes, int64_t rows, int64_t dim) {
    struct room *r = bytes;
    r->out = (float *)(r + 1), r->best = r->out + rows * dim, r->total = r->best + rows;
    r->q = (bf16 *)(r->total + rows);
    return r;
}
