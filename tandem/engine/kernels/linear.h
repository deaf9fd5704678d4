/* x weight^T, a packed panel at a time.

   One walk over a panel, which is one sequential stream, feeds a tile's rows of x; so decode reads every weight once.
   Where there are more rows, the first walk leaves the panel open in the L2 cache for the others. */

#pragma once
#include "model.h"
#include "quantized.h"

/* out = x weight^T (+ bias) (+ residual); WIDE: in float32; SILU and what follows: activation(gate) * up of outputs
   (gate | up) */
enum kind { PLAIN, WIDE, SILU, GELU_TANH, CLAMPED };

/* KV that the next attention will read: `count` runs of `bytes`, `runs` of them a block. Fetched early, while linears
   compute. */
struct upcoming { const char *kv; const int32_t *blocks; int64_t count, bytes, runs, block_stride, run_stride; };

struct linear {
    bf16 *x;
    const struct weight *weight;
    const bf16 *bias, *residual;
    void *out;
    int64_t stride; /* numbers from a row of `out` and `residual` to the next; 0: as many as a row has */
    int64_t rows;
    enum kind kind;
    const struct lora_part *const *adapters; /* of each row, if any has one: `added` (rows, outputs) is added to it */
    const float *added;
    struct upcoming upcoming;
    bf16 *ordered; /* where x goes in the weight's order, if it has one; null: where it is */
    float scale;   /* of what is added to the residual */
    int64_t first; /* which row of x_sums the first row has */
};

static inline int64_t row_stride(const struct linear *j) {
    return j->stride ? j->stride : j->weight->outputs / (j->kind >= SILU ? 2 : 1);
}

/* What is added to a row's output `column`. */
static inline __m512 added16(const struct linear *j, int64_t row, int64_t column, __m512 sum) {
    if (!j->adapters || !j->adapters[row]) return sum;
    return _mm512_add_ps(sum, _mm512_loadu_ps(j->added + row * j->weight->outputs + column));
}

/* Writes a result to `to`, where all results of a piece stay until a thread has won the piece. */
static inline void finish16(const struct linear *j, int64_t row, int64_t column, __m512 sum, void *to) {
    const int64_t at = row * row_stride(j) + column;
    sum = added16(j, row, column, sum);
    if (j->bias) sum = _mm512_add_ps(sum, load16(j->bias + column));
    if (j->residual) sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(j->scale), load16(j->residual + at));
    if (j->kind == WIDE) _mm512_storeu_ps(to, sum);
    else store16(to, sum);
}

/* An activation is gate / (1 + exp(-x)); returns x. */
static inline __m512 steepness(enum kind kind, __m512 gate) {
    if (kind == SILU) return gate;
    if (kind == CLAMPED) return _mm512_mul_ps(gate, _mm512_set1_ps(1.702f));
    const __m512 square = _mm512_mul_ps(gate, gate); /* 2 sqrt(2 / pi) (gate + 0.044715 gate^3) */
    return _mm512_mul_ps(gate, _mm512_fmadd_ps(square, _mm512_set1_ps(0.0713548163f), _mm512_set1_ps(1.59576912f)));
}

static inline void finish_gated(const struct linear *j, int64_t row, int64_t column, __m512 gate, __m512 up, bf16 *to) {
    const int64_t size = j->weight->outputs / 2;
    gate = added16(j, row, column, gate), up = added16(j, row, size + column, up);
    if (j->bias) {
        gate = _mm512_add_ps(gate, load16(j->bias + column));
        up = _mm512_add_ps(up, load16(j->bias + size + column));
    }
    if (j->kind == CLAMPED) {
        const __m512 bound = _mm512_set1_ps(7.0f), least = _mm512_set1_ps(-7.0f);
        gate = _mm512_min_ps(gate, bound);
        up = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_max_ps(_mm512_min_ps(up, bound), least));
    }
    const __m512 x = steepness(j->kind, gate);
    const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    store16(to, _mm512_div_ps(_mm512_mul_ps(gate, up), below));
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

/* The run that tile `at` of `tiles` fetches: all runs where there are no more of them than tiles, each by the
   thread that will most likely attend to it. */
static inline const char *upcoming_run(const struct upcoming *s, int64_t at, int64_t tiles) {
    const int64_t run = at * s->count / tiles;
    if (run >= (at + 1) * s->count / tiles) return 0;
    return s->kv + s->blocks[run / s->runs] * s->block_stride + run % s->runs * s->run_stride;
}

/* Of `words`, codes of 16 outputs' two inputs each; `scales`, `offsets`: of those outputs, each twice. */
static inline __m512i dequantize(__m256i words, const int bits, const __m512 *scales, const __m512 *offsets) {
    const __m128i first = _mm256_castsi256_si128(words), last = _mm256_extracti128_si256(words, 1);
    const __m512i low = bits == 8 ? _mm512_cvtepi8_epi32(first) : _mm512_cvtepu8_epi32(first);
    const __m512i high = bits == 8 ? _mm512_cvtepi8_epi32(last) : _mm512_cvtepu8_epi32(last);
    const __m512 a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), scales[0], offsets[0]);
    const __m512 b = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), scales[1], offsets[1]);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* 32 of a group's scales and offsets, from `at` on, each twice. */
static inline void doubled(const struct weight *w, const uint8_t *group, int64_t at, __m512 *to) {
    const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int half = 0; half < 2; half++) {
        const __m512 numbers = scales16(group, w->scale_type, at + half * 16);
        to[half * 2] = _mm512_permutexvar_ps(first, numbers), to[half * 2 + 1] = _mm512_permutexvar_ps(last, numbers);
    }
}

/* One group of a quantized panel, opened; `ahead` is fetched meanwhile. */
static inline __attribute__((always_inline)) void open_group(const struct weight *w, const uint8_t *group,
                                                             const int bits, uint32_t *to, const char *ahead) {
    const uint8_t *codes = group + scale_bytes(w);
    const int64_t pairs = w->group / 2;
    __m512 scales[4], offsets[4];
    doubled(w, group, 0, scales), doubled(w, group, 32, offsets);
    for (int i = 0; bits == 8 && i < 4; i++)
        offsets[i] = _mm512_fmadd_ps(_mm512_set1_ps(128.0f), scales[i], offsets[i]);
    for (int64_t k = 0; k < pairs; k++, to += 32, codes += bits * 8) {
        __m256i first = _mm256_loadu_si256((const void *)codes), last;
        if (bits == 8) last = _mm256_loadu_si256((const void *)(codes + 32));
        else {
            const __m256i mask = _mm256_set1_epi8(0xf);
            last = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask), first = _mm256_and_si256(first, mask);
        }
        _mm512_store_si512(to, dequantize(first, bits, scales, offsets));
        _mm512_store_si512(to + 16, dequantize(last, bits, scales + 2, offsets + 2));
        if (ahead) _mm_prefetch(ahead, _MM_HINT_T1), ahead += bits * 8;
    }
}

/* A quantized panel, opened; meanwhile the panel `ahead` is fetched. */
static void open_quantized(const struct weight *w, int64_t panel, uint32_t *to, const char *ahead) {
    const int64_t each = w->group / 2;
    const uint8_t *group = w->bytes + panel * panel_bytes(w);
    for (int64_t k = 0; k < w->inputs / 2; k += each, to += each * 32, group += group_bytes(w)) {
        const char *next = ahead ? ahead + k / each * group_bytes(w) : 0;
        if (w->bits == 8) open_group(w, group, 8, to, next);
        else open_group(w, group, 4, to, next);
    }
}

/* Bytes of a row of a panel's results. */
static inline int64_t result_row(const struct linear *j) { return j->kind >= SILU ? 32 : j->kind == WIDE ? 128 : 64; }

/* `to`: room for all rows of the panel. */
static void finish_rows(const struct linear *j, int64_t panel, int64_t row, int64_t rows, const float *sums, char *to) {
    const int64_t bytes = result_row(j);
    to += row * bytes;
    for (int64_t m = 0; m < rows; m++, to += bytes) {
        const __m512 a = _mm512_loadu_ps(sums + m * 32), b = _mm512_loadu_ps(sums + m * 32 + 16);
        if (j->kind >= SILU) finish_gated(j, row + m, panel * 16, a, b, (bf16 *)to);
        else finish16(j, row + m, panel * 32, a, to), finish16(j, row + m, panel * 32 + 16, b, to + bytes / 2);
    }
}

static void put_rows(const struct linear *j, int64_t panel, const char *from) {
    const int64_t bytes = result_row(j), stride = row_stride(j) * (j->kind == WIDE ? sizeof(float) : sizeof(bf16));
    char *to = (char *)j->out + panel * bytes;
    for (int64_t row = 0; row < j->rows; row++, from += bytes, to += stride)
        for (int64_t i = 0; i < bytes; i += 32)
            _mm256_storeu_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
}

/* AMX multiplies AMX_PAIRS steps at once, and reads the last of a panel behind zeros. */
static void pad_steps(uint32_t *open, int64_t pairs) {
    const int64_t tail = pairs % AMX_PAIRS;
    if (!has_amx || !tail) return;
    memmove(open + (pairs + AMX_PAIRS - 2 * tail) * 32, open + (pairs - tail) * 32, tail * 128);
    memset(open + (pairs - tail) * 32, 0, (AMX_PAIRS - tail) * 128);
}

/* As linear_panel, of a quantized weight. Each of the tiles fetches KV. */
static void amx_quantized_panel(const struct thread *thread, const struct linear *j, int64_t panel, const char *ahead) {
    const struct weight *w = j->weight;
    const int64_t pairs = w->inputs / 2, count = num_tiles(j->rows);
    _Alignas(64) float sums[MOST_ROWS * 32];
    open_quantized(w, panel, thread->opened, ahead);
    pad_steps(thread->opened, pairs);
    for (int64_t t = 0; t < count; t++) {
        const int64_t row = tile_begin(j->rows, t, count), rows = tile_begin(j->rows, t + 1, count) - row;
        struct panel_at at = {.ahead = upcoming_run(&j->upcoming, panel * count + t, w->outputs / 32 * count)};
        if (at.ahead) at.lines = j->upcoming.bytes / 64;
        at.open = thread->opened;
        multiply((const int32_t *)j->x + row * pairs, rows, pairs, pairs, sums, &at);
        finish_rows(j, panel, row, rows, sums, thread->result);
    }
}

/* The same with AVX512. The next panel is `ahead`: it is fetched while the first tile is computed. */
static void quantized_panel(const struct thread *thread, const struct linear *j, int64_t panel, const char *ahead) {
    const struct weight *w = j->weight;
    const int64_t pairs = w->inputs / 2, groups = w->inputs / w->group, count = num_tiles(j->rows);
    _Alignas(64) float sums[MOST_ROWS * 32];
    for (int64_t t = 0; t < count; t++) {
        const int64_t row = tile_begin(j->rows, t, count), rows = tile_begin(j->rows, t + 1, count) - row;
        struct quantized_at at = {
            .groups = w->bytes + panel * panel_bytes(w), .open = thread->opened, .ahead = ahead, .count = groups,
            .pairs = w->group / 2, .bytes = group_bytes(w), .scale_type = w->scale_type, .scale_bytes = scale_bytes(w),
            .half = (int64_t)1 << (w->bits - 1), .num_groups = groups,
            .x_sums = thread->x_sums + (j->first + row) * groups,
        };
        if (!t && count > 1) at.opened = thread->opened;
        if (t) at.ahead = upcoming_run(&j->upcoming, panel * (count - 1) + t - 1, w->outputs / 32 * (count - 1));
        if (t && at.ahead) at.lines = j->upcoming.bytes / 64;
        const quantized_fn *tiles = t ? quantized0 : w->bits == 8 ? quantized8 : quantized4;
        tiles[rows]((const int32_t *)j->x + row * pairs, pairs, sums, &at);
        finish_rows(j, panel, row, rows, sums, thread->result);
    }
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
        if (t >= walks) at.ahead = upcoming_run(&j->upcoming, tile, w->outputs / 32 * free_tiles);
        else if (ahead) at.ahead = ahead + t * pairs * 64;
        if (at.ahead) at.lines = t >= walks ? j->upcoming.bytes / 64 : walks < 2 ? 2 : t ? pairs : 1;
        multiply((const int32_t *)j->x + row * pairs, rows, pairs, pairs, sums, &at);
        if (!has_amx) add_rare(j, panel, row, rows, sums);
        finish_rows(j, panel, row, rows, sums, thread->result);
    }
}

static void one_panel(const struct thread *thread, const struct linear *j, int64_t panel, const char *ahead) {
    if (!j->weight->bits) linear_panel(thread, j, panel, ahead);
    else (has_amx ? amx_quantized_panel : quantized_panel)(thread, j, panel, ahead);
}

static void linear_rows(struct thread *thread, const struct linear *job) {
    const char *bytes = (const char *)job->weight->bytes;
    if (job->weight->bits && !has_amx) sum_groups(thread, job->x, job->rows, job->weight->inputs, job->weight->group);
    begin(thread, job->weight->outputs / 32);
    for (int64_t next, panel; (panel = take(thread, &next)) >= 0;) {
        one_panel(thread, job, panel, next < 0 ? 0 : bytes + next * panel_bytes(job->weight));
        if (win(thread, panel)) put_rows(job, panel, thread->result), written(thread);
    }
}

/* Puts rows of x into the order of the weight's inputs, at `to`. No later layer reads these rows. */
static void reorder(struct thread *thread, const bf16 *x, bf16 *to, int64_t rows, const struct weight *w) {
    bf16 *room = (bf16 *)thread->opened;
    begin(thread, rows);
    for (int64_t next, row; (row = take(thread, &next)) >= 0;) {
        const bf16 *from = x + row * w->inputs;
        for (int64_t i = 0; i < w->inputs; i++) room[i] = from[w->order[i]];
        if (win(thread, row)) memcpy(to + row * w->inputs, room, w->inputs * sizeof *room), written(thread);
    }
}

enum { L2_BYTES = 1 << 20, LEAST_ROWS = 128 }; /* about half of the cache */

/* AMX multiplies faster than rows come from beyond the L2 cache: so no more rows at once than fit into it, but not so
   few that opening the panels again costs more. */
static void linear(struct thread *thread, struct linear job) {
    const struct weight *w = job.weight;
    const int64_t bytes = w->inputs * sizeof *job.x, rows = job.rows;
    const int64_t fit = L2_BYTES / bytes / MOST_ROWS * MOST_ROWS;
    const int64_t most = !has_amx ? rows : fit < LEAST_ROWS ? LEAST_ROWS : fit;
    const int64_t stride = row_stride(&job), out_bytes = stride * (job.kind == WIDE ? 4 : 2);
    if (w->order) {
        bf16 *to = job.ordered ? job.ordered : job.x;
        reorder(thread, job.x, to, rows, w), job.x = to;
    }
    for (int64_t row = 0; row < rows; row += most) {
        struct linear part = job;
        part.x += row * w->inputs, part.out = (char *)job.out + row * out_bytes;
        if (job.residual) part.residual += row * stride;
        if (job.adapters) part.adapters += row, part.added += row * w->outputs;
        part.rows = row + most < rows ? most : rows - row;
        linear_rows(thread, &part);
    }
}
