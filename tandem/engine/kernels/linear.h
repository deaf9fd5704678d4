/* x weight^T, a packed panel at a time.

   One walk over a panel, which is one sequential stream, feeds up to 12 rows of x; so decode reads every weight once.
   Where there are more rows, the first walk leaves the panel open in the L2 cache for the others. */

#pragma once
#include "packing.h"
#include "threads.h"

/* ---- tiles: sums (COUNT, 32) = COUNT rows of x, `stride` pairs apart, times one panel of `pairs` steps.
        READ: an open panel, 32 pairs a step; OPEN: a packed one, with the exponents of `codes`; it is left open in
        `opened` where that is given. Meanwhile cache lines are asked for from `ahead` on: READ: `lines` of them, one a
        step; OPEN: `lines` of them a step ---- */

struct panel_at { const uint32_t *open; const uint8_t *packed; __m512i codes; uint32_t *opened; const char *ahead; int64_t lines; };

static inline __m512i open16(const uint8_t *signs, __m512i exponents) {
    __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)signs));
    return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16((short)0x807f), exponents, 0xea); /* a & b | c */
}

#define TILE(NAME, COUNT, PACKED) \
    static void NAME##COUNT(const int32_t *x, int64_t stride, int64_t pairs, float *sums, const struct panel_at *at) { \
        const uint32_t *open = at->open; \
        const uint8_t *packed = at->packed; \
        const char *ahead = at->ahead; \
        uint32_t *opened = at->opened; \
        const int64_t lines = at->lines; \
        const __m512i table = at->codes; \
        __m512 sum[COUNT][2]; \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps(); \
        const int32_t *thirds[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride}; \
        for (int64_t k = 0; k < pairs; k++) { \
            __m512i w0, w1; \
            if (PACKED) { \
                __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(packed + 64))); \
                w0 = open16(packed, _mm512_permutexvar_epi16(codes, table)); \
                w1 = open16(packed + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table)); \
                packed += STEP_BYTES; \
                if (opened) _mm512_store_si512(opened, w0), _mm512_store_si512(opened + 16, w1), opened += 32; \
                if (lines > 0) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
                if (lines > 1) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 32; \
            } else { \
                w0 = _mm512_loadu_si512(open), w1 = _mm512_loadu_si512(open + 16), open += 32; \
                if (k < lines) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
            } \
            _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
                __m512bh a = (__m512bh)_mm512_set1_epi32(thirds[m / 3][m % 3 * stride]); \
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, (__m512bh)w0); \
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], a, (__m512bh)w1); \
            } \
            _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) thirds[i]++; \
        } \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
            _mm512_storeu_ps(sums + m * 32, sum[m][0]); \
            _mm512_storeu_ps(sums + m * 32 + 16, sum[m][1]); \
        } \
    }
#define TILES(NAME, PACKED) \
    TILE(NAME, 1, PACKED) TILE(NAME, 2, PACKED) TILE(NAME, 3, PACKED) TILE(NAME, 4, PACKED) TILE(NAME, 5, PACKED) \
    TILE(NAME, 6, PACKED) TILE(NAME, 7, PACKED) TILE(NAME, 8, PACKED) TILE(NAME, 9, PACKED) TILE(NAME, 10, PACKED) \
    TILE(NAME, 11, PACKED) TILE(NAME, 12, PACKED) \
    static const tile_fn NAME[] = {0, NAME##1, NAME##2, NAME##3, NAME##4, NAME##5, NAME##6, NAME##7, NAME##8, NAME##9, \
                                   NAME##10, NAME##11, NAME##12};

enum { TILE_ROWS = 12 };
typedef void (*tile_fn)(const int32_t *, int64_t, int64_t, float *, const struct panel_at *);
TILES(read_tiles, 0)
TILES(open_tiles, 1)

static inline int64_t num_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* out = x weight^T (+ bias) (+ residual); WIDE: in float32; SILU: silu(gate) * up of outputs (gate | up) */
enum kind { PLAIN, WIDE, SILU };

/* KV blocks that will be read soon: blocks[i] * bytes from kv on. */
struct soon { const char *kv; const int32_t *blocks; int64_t count, bytes; };

struct linear {
    const bf16 *x;
    const struct weight *weight;
    const bf16 *bias, *residual;
    void *out;
    int64_t rows;
    enum kind kind;
    struct soon soon;
};

static inline void finish16(const struct linear *j, int64_t row, int64_t column, __m512 sum) {
    int64_t at = row * j->weight->outputs + column;
    if (j->bias) sum = _mm512_add_ps(sum, load16(j->bias + column));
    if (j->residual) sum = _mm512_add_ps(sum, load16(j->residual + at));
    if (j->kind == WIDE) _mm512_storeu_ps((float *)j->out + at, sum);
    else store16((bf16 *)j->out + at, sum);
}

static inline void finish_silu(const struct linear *j, int64_t row, int64_t column, __m512 gate, __m512 up) {
    const int64_t size = j->weight->outputs / 2;
    if (j->bias) {
        gate = _mm512_add_ps(gate, load16(j->bias + column));
        up = _mm512_add_ps(up, load16(j->bias + size + column));
    }
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    store16((bf16 *)j->out + row * size + column, _mm512_div_ps(_mm512_mul_ps(gate, up), below));
}

/* What the listed numbers of a panel add to the sums of `rows` rows from `row` on. */
static inline void add_rare(const struct linear *j, int64_t panel, int64_t row, int64_t rows, float *sums) {
    const struct panel *p = j->weight->panels + panel;
    for (const struct rare *r = j->weight->rare + p->first_rare; r < j->weight->rare + p[1].first_rare; r++)
        for (int64_t m = 0; m < rows; m++) sums[m * 32 + r->at % 32] += wide(j->x[(row + m) * j->weight->inputs + r->at / 32]) * r->value;
}

/* Exponents, in their place in a number, of the codes; twice, for a code's upper neighbour is in its way. */
static inline __m512i exponents(int32_t base) {
    const __m512i n = _mm512_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8, 7,
                                       6, 5, 4, 3, 2, 1, 0);
    return _mm512_maskz_slli_epi16(0xfffefffe, _mm512_add_epi16(n, _mm512_set1_epi16((short)base)), 7);
}

static inline int64_t panel_bytes(const struct weight *w) { return w->inputs / 2 * STEP_BYTES; }

/* The block that tile `at` of `tiles` brings along: all of them if they are no more than the tiles, each by the thread to
   which attention's order will most likely give it. */
static inline const char *block_soon(const struct soon *s, int64_t at, int64_t tiles) {
    const int64_t block = at * s->count / tiles;
    return block < (at + 1) * s->count / tiles ? s->kv + s->blocks[block] * s->bytes : 0;
}

/* `ahead` is fetched while the first tile (two, where there are more) is computed; the first one opens the panel for the
   others. The tiles after them, whose operands are all at hand, fetch KV. */
static void linear_panel(const struct hand *h, const struct linear *j, int64_t panel, const char *ahead) {
    const struct weight *w = j->weight;
    const int64_t pairs = w->inputs / 2, count = num_tiles(j->rows);
    float sums[TILE_ROWS * 32];
    for (int64_t t = 0; t < count; t++) {
        const int64_t row = j->rows * t / count, rows = j->rows * (t + 1) / count - row;
        struct panel_at at = {h->opened, w->bytes + panel * panel_bytes(w), exponents(w->panels[panel].base),
                              count > 1 ? h->opened : 0, ahead ? ahead + t * pairs * 64 : 0, 0};
        if (t > 1) at.ahead = block_soon(&j->soon, panel * (count - 2) + t - 2, w->outputs / 32 * (count - 2));
        if (at.ahead) at.lines = t > 1 ? j->soon.bytes / 64 : t ? pairs : count > 1 ? 1 : 2;
        (t ? read_tiles : open_tiles)[rows]((const int32_t *)j->x + row * pairs, pairs, pairs, sums, &at);
        add_rare(j, panel, row, rows, sums);
        for (int64_t m = 0; m < rows; m++) {
            __m512 a = _mm512_loadu_ps(sums + m * 32), b = _mm512_loadu_ps(sums + m * 32 + 16);
            if (j->kind == SILU) finish_silu(j, row + m, panel * 16, a, b);
            else finish16(j, row + m, panel * 32, a), finish16(j, row + m, panel * 32 + 16, b);
        }
    }
}

static void linear(struct hand *h, struct linear job) {
    const char *bytes = (const char *)job.weight->bytes;
    begin(h, job.weight->outputs / 32);
    for (int64_t next, panel; (panel = take(h, &next)) >= 0;)
        linear_panel(h, &job, panel, next < 0 ? 0 : bytes + next * panel_bytes(job.weight));
}

