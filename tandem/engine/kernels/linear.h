/* x weight^T, a packed panel at a time.

   One walk over a panel, which is one sequential stream, feeds a tile's rows of x; so decode reads every weight once.
   Where there are more rows, the first walk leaves the panel open in the L2 cache for the others. */

#pragma once
#include "amx.h"
#include "threads.h"

/* out = x weight^T (+ bias) (+ residual); WIDE: in float32; SILU: silu(gate) * up of outputs (gate | up) */
enum kind { PLAIN, WIDE, SILU };

/* KV blocks that the next attention will read, at kv + blocks[i] * bytes: fetched early, while linears compute. */
struct upcoming { const char *kv; const int32_t *blocks; int64_t count, bytes; };

struct linear {
    const bf16 *x;
    const struct weight *weight;
    const bf16 *bias, *residual;
    void *out;
    int64_t rows;
    enum kind kind;
    struct upcoming upcoming;
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
        for (int64_t m = 0; m < rows; m++)
            sums[m * 32 + r->at % 32] += wide(j->x[(row + m) * j->weight->inputs + r->at / 32]) * r->value;
}

/* Exponents of the codes, in their place in a number. Twice: a lookup takes 5 bits, a code and the lowest bit of its
   neighbour. */
static inline __m512i exponents(int32_t base) {
    const __m512i n = _mm512_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0,
                                       15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_maskz_slli_epi16(0xfffefffe, _mm512_add_epi16(n, _mm512_set1_epi16((short)base)), 7);
}

static inline int64_t panel_bytes(const struct weight *w) { return w->inputs / 2 * STEP_BYTES; }

/* The block that tile `at` of `tiles` fetches: all blocks where there are no more of them than tiles, each by the
   thread that will most likely attend to it. */
static inline const char *upcoming_block(const struct upcoming *s, int64_t at, int64_t tiles) {
    const int64_t block = at * s->count / tiles;
    return block < (at + 1) * s->count / tiles ? s->kv + s->blocks[block] * s->bytes : 0;
}

/* The next panel is `ahead`: it is fetched while the first tile is computed, or the first two of AVX512. The other
   tiles, whose operands are in the cache, fetch KV. The first one opens the panel for the others. */
static void linear_panel(const struct thread *thread, const struct linear *j, int64_t panel, const char *ahead) {
    const struct weight *w = j->weight;
    const struct panel *p = w->panels + panel;
    const int64_t pairs = w->inputs / 2, count = num_tiles(j->rows), walks = has_amx || count == 1 ? 1 : 2;
    _Alignas(64) float sums[MOST_ROWS * 32];
    for (int64_t t = 0; t < count; t++) {
        const int64_t row = tile_begin(j->rows, t, count), rows = tile_begin(j->rows, t + 1, count) - row;
        struct panel_at at = {.open = thread->opened, .opened = count > 1 ? thread->opened : 0,
                              .codes = exponents(p->base),
                              .rare = w->rare + p->first_rare, .rare_end = w->rare + p[1].first_rare};
        const int64_t free_tiles = count - walks, tile = panel * free_tiles + t - walks; /* those that fetch KV */
        if (!t) at.packed = w->bytes + panel * panel_bytes(w);
        if (t >= walks) at.ahead = upcoming_block(&j->upcoming, tile, w->outputs / 32 * free_tiles);
        else if (ahead) at.ahead = ahead + t * pairs * 64;
        if (at.ahead) at.lines = t >= walks ? j->upcoming.bytes / 64 : walks < 2 ? 2 : t ? pairs : 1;
        multiply((const int32_t *)j->x + row * pairs, rows, pairs, pairs, sums, &at);
        if (!has_amx) add_rare(j, panel, row, rows, sums);
        for (int64_t m = 0; m < rows; m++) {
            __m512 a = _mm512_loadu_ps(sums + m * 32), b = _mm512_loadu_ps(sums + m * 32 + 16);
            if (j->kind == SILU) finish_silu(j, row + m, panel * 16, a, b);
            else finish16(j, row + m, panel * 32, a), finish16(j, row + m, panel * 32 + 16, b);
        }
    }
}

static void linear_rows(struct thread *thread, const struct linear *job) {
    const char *bytes = (const char *)job->weight->bytes;
    begin(thread, job->weight->outputs / 32);
    for (int64_t next, panel; (panel = take(thread, &next)) >= 0;)
        linear_panel(thread, job, panel, next < 0 ? 0 : bytes + next * panel_bytes(job->weight));
}

enum { L2_BYTES = 1 << 20, LEAST_ROWS = 128 }; /* about half of the cache */

/* AMX multiplies faster than rows come from beyond the L2 cache: so no more rows at once than fit into it, but not so
   few that opening the panels again costs more. */
static void linear(struct thread *thread, struct linear job) {
    const struct weight *w = job.weight;
    const int64_t bytes = w->inputs * sizeof *job.x, rows = job.rows;
    const int64_t fit = L2_BYTES / bytes / MOST_ROWS * MOST_ROWS;
    const int64_t most = !has_amx ? rows : fit < LEAST_ROWS ? LEAST_ROWS : fit;
    const int64_t out_bytes = w->outputs * (job.kind == SILU ? 1 : job.kind == WIDE ? 4 : 2);
    for (int64_t row = 0; row < rows; row += most) {
        struct linear part = job;
        part.x += row * w->inputs, part.out = (char *)job.out + row * out_bytes;
        if (job.residual) part.residual += row * w->outputs;
        part.rows = row + most < rows ? most : rows - row;
        linear_rows(thread, &part);
    }
}
