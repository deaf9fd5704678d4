/* The decoder's forward pass in bfloat16 for x86 CPUs with AVX512-BF16, or AMX too: sums in float32, each rounded once
   at its end.

   forward    for each layer: norm, qkv, rope and write to the cache, attention, o, norm, gate-up-silu, down or experts
   logits     norm and head of some rows

   All layers run in one parallel region. */

#include "attention.h"
#include "experts.h"
#include "lora.h"
#include "sampling.h"

/* ---- norm, rope, cache ---- */

enum { ROWS_A_PIECE = 4 };

static inline int64_t row_width(const struct model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

/* out = (residual +) x normalized; without a weight x as it is. */
static inline void norm_row(const struct model *m, const bf16 *x, const bf16 *weight, const bf16 *residual, bf16 *out,
                            int64_t size) {
    if (!weight) {
        memcpy(out, x, size * sizeof *out);
        return;
    }
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) sum = _mm512_fmadd_ps(load16(x + i), load16(x + i), sum);
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)size + m->eps));
    const __m512 from = _mm512_set1_ps(m->weights_from), added = _mm512_set1_ps(m->residual_scale);
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 normed = _mm512_mul_ps(load16(x + i), scale), w = _mm512_add_ps(load16(weight + i), from);
        const __m512 product = _mm512_mul_ps(normed, w);
        store16(out + i, residual ? _mm512_fmadd_ps(product, added, load16(residual + i)) : product);
    }
}

/* `picked`: which rows of x, one after the other; all of them where it is null. */
static void norm(struct thread *thread, const struct model *m, const bf16 *x, const int64_t *picked, const bf16 *weight,
                 const bf16 *residual, bf16 *out, int64_t rows) {
    const int64_t size = m->hidden;
    begin(thread, (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE);
    bf16 *normed = thread->result;
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        const int64_t first = piece * ROWS_A_PIECE, left = rows - first;
        const int64_t count = left < ROWS_A_PIECE ? left : ROWS_A_PIECE;
        for (int64_t n = 0; n < count; n++)
            norm_row(m, x + (picked ? picked[first + n] : first + n) * size, weight,
                     residual ? residual + (first + n) * size : 0, normed + n * size, size);
        if (win(thread, piece)) memcpy(out + first * size, normed, count * size * sizeof *out), written(thread);
    }
}

static void rotate(bf16 *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        __m512 a = load16(x + i), b = load16(x + half + i), c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        store16(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store16(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

/* The same of pairs that lie side by side. */
static void rotate_pairs(bf16 *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __m512i pairs = _mm512_loadu_si512(x + 2 * i);
        const __m512 a = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), c = _mm512_loadu_ps(cos + i);
        const __m512 b = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(0xaaaaaaaa, pairs)), s = _mm512_loadu_ps(sin + i);
        const __m256i first = (__m256i)_mm512_cvtneps_pbh(_mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        const __m256i second = (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
        _mm512_storeu_si512(x + 2 * i, _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                                                       _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16)));
    }
}

/* Norms (where there are weights) and rotates the q and k heads of one row, a copy (q | k | v). */
static void turn_row(const struct model *m, const struct layer *l, const struct step *s, int64_t row, bf16 *x) {
    const int64_t dim = m->head_dim, half = m->rotated / 2, at = (l->angles * s->rows + row) * half;
    if (m->norms_all) {
        norm_row(m, x, l->q_norm, 0, x, m->heads * dim);
        norm_row(m, x + m->heads * dim, l->k_norm, 0, x + m->heads * dim, m->kv_heads * dim);
    }
    for (int64_t head = 0; head < m->heads + m->kv_heads; head++, x += dim) {
        const bf16 *weight = head < m->heads ? l->q_norm : l->k_norm;
        if (weight && !m->norms_all) norm_row(m, x, weight, 0, x, dim);
        if (l->angles >= 0) (m->interleaved ? rotate_pairs : rotate)(x, s->cos + at, s->sin + at, half);
    }
}

/* q goes back into the row, k and v into its slot. */
static void place_row(const struct model *m, const struct layer *l, const struct step *s, int64_t row, const bf16 *x) {
    const int64_t dim = m->head_dim, size = m->block_size;
    memcpy(s->qkv + row * row_width(m), x, m->heads * dim * sizeof *x);
    x += m->heads * dim;
    const int64_t slot = (l->window ? s->near_slots : s->slots)[row];
    char *to = l->kv + slot / size * m->block_stride + slot % size * kv_row(m);
    for (int64_t head = 0; head < m->kv_heads; head++, to += size * kv_row(m), x += dim) {
        write_row(m, x, to);
        write_row(m, x + m->kv_heads * dim, to + m->value_stride);
    }
}

static void place(struct thread *thread, const struct model *m, const struct layer *l, const struct step *s) {
    begin(thread, (s->rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE);
    const int64_t width = row_width(m);
    bf16 *turned = thread->result;
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        const int64_t first = piece * ROWS_A_PIECE, left = s->rows - first;
        const int64_t count = left < ROWS_A_PIECE ? left : ROWS_A_PIECE;
        memcpy(turned, s->qkv + first * width, count * width * sizeof *turned);
        for (int64_t n = 0; n < count; n++) turn_row(m, l, s, first + n, turned + n * width);
        if (!win(thread, piece)) continue;
        for (int64_t n = 0; n < count; n++) place_row(m, l, s, first + n, turned + n * width);
        written(thread);
    }
}

/* ---- the passes ---- */

struct pass {
    const struct model *model;
    const struct step *step;
    int64_t first, end;    /* first ... end: halves of layers */
    _Atomic int failed;    /* ranks have waited in vain */
    uint32_t met;          /* meetings of ranks up to its end */
    const int64_t *picked; /* rows, for logits */
    float *logits;
    char *rooms; /* of each thread: result_bytes, then room_bytes with room_rows rows */
    int64_t result_bytes, room_bytes, room_rows;
    struct team team;
};

static inline char *room_of(const struct pass *p, int64_t thread) {
    return p->rooms + thread * (p->result_bytes + p->room_bytes);
}

static struct thread join_pass(struct pass *p) {
    struct thread thread = join(&p->team);
    thread.opened = p->model->opened + thread.me * p->model->opened_size;
    thread.x_sums = p->model->x_sums;
    if (p->model->ranks) thread.met = *p->model->ranks->met;
    thread.result = room_of(p, thread.me);
    take_tiles();
    return thread;
}

/* Computes the rotary angles of each row's position, of all kinds. */
static void angles(struct thread *thread, const struct model *m, const struct step *s) {
    const int64_t half = m->rotated / 2;
    begin(thread, m->angles * s->rows);
    float *cos = thread->result, *sin = cos + half;
    for (int64_t next, at; (at = take(thread, &next)) >= 0;) {
        const int64_t kind = at / s->rows;
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)s->positions[at % s->rows] * m->inverse[kind * half + i];
            cos[i] = cosf(angle) * m->factors[kind], sin[i] = sinf(angle) * m->factors[kind];
        }
        if (!win(thread, at)) continue;
        memcpy(s->cos + at * half, cos, half * sizeof *cos), memcpy(s->sin + at * half, sin, half * sizeof *sin);
        written(thread);
    }
}

/* Computes the layer until its k and v are in the cache. */
static void first_half(struct thread *thread, const struct model *m, const struct layer *l, const struct step *s) {
    norm(thread, m, s->x, 0, l->norms[0], 0, s->normed, s->rows);
    adapt(thread, s, l - m->layers, s->normed, &l->qkv, QKV_PARTS, 3);
    linear(thread, (struct linear){.x = s->normed, .weight = &l->qkv, .bias = l->qkv_bias, .out = s->qkv,
                                   .rows = s->rows, .adapters = s->adapters, .added = s->added});
    place(thread, m, l, s);
}

/* Waits until all ranks have written what this one has. Returns 0, or -1 where that is in vain. */
static int meet(struct thread *thread, const struct model *m) {
    if (!m->ranks) return 0;
    begin(thread, 1);
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;)
        if (win(thread, piece)) m->ranks->arrive(m->ranks->meetings), written(thread);
    return m->ranks->wait(m->ranks->meetings, ++thread->met) ? -1 : 0;
}

/* Adds the outputs of a linear layer of x, which ranks have computed together, to s->x, normed where there is a weight
   `after`. Returns 0 or -1. */
static int add_linear(struct thread *thread, const struct model *m, const struct step *s, int64_t layer, bf16 *x,
                      const struct weight *weight, const bf16 *bias, const bf16 *after, int64_t place) {
    const struct columns *own = &m->outputs;
    bf16 *out = after ? s->plain : s->x;
    if (meet(thread, m)) return -1;
    adapt(thread, s, layer, x, weight, place, 1);
    linear(thread, (struct linear){.x = x, .weight = weight, .bias = bias, .residual = after ? 0 : s->x + own->first,
                                   .out = out + own->first, .stride = own->of, .rows = s->rows,
                                   .adapters = s->adapters, .added = s->added, .ordered = s->ordered,
                                   .scale = m->residual_scale});
    if (meet(thread, m)) return -1;
    if (after) norm(thread, m, out, 0, after, s->x, s->x, s->rows);
    return 0;
}

static struct upcoming upcoming_of(const struct model *m, const struct layer *next, const struct step *s) {
    const int64_t half = m->kv_heads * m->block_size * kv_row(m), runs = m->value_stride == half ? 1 : 2;
    return (struct upcoming){next->kv, s->tables, s->table_starts[s->seqs] * runs, 2 / runs * half, runs,
                             m->block_stride, m->value_stride};
}

/* `next`: the layer that follows, if any, whose KV is fetched during gate-up. Returns 0, or -1 where ranks have waited
   in vain. */
static int second_half(struct thread *thread, const struct model *m, const struct layer *l, const struct layer *next,
                       const struct step *s, struct room *r) {
    const int64_t layer = l - m->layers;
    struct upcoming upcoming = {0};
    if (next && !next->window) upcoming = upcoming_of(m, next, s);
    attention(thread, m, l, s, r);
    if (add_linear(thread, m, s, layer, s->attended, &l->o, l->o_bias, l->norms[1], O_PARTS)) return -1;
    norm(thread, m, s->x, 0, l->norms[2], 0, s->normed, s->rows);
    if (l->experts) {
        compute_experts(thread, m, l, s);
        return 0;
    }
    adapt(thread, s, layer, s->normed, &l->gate_up, GATE_UP_PARTS, 2);
    linear(thread, (struct linear){.x = s->normed, .weight = &l->gate_up, .bias = l->gate_up_bias,
                                   .out = s->inner + m->inner.first, .stride = m->inner.of, .rows = s->rows,
                                   .kind = m->activation, .adapters = s->adapters, .added = s->added,
                                   .upcoming = upcoming});
    return add_linear(thread, m, s, layer, s->inner, &l->down, l->down_bias, l->norms[3], DOWN_PARTS);
}

static void run_halves(void *data) {
    struct pass *p = data;
    struct thread thread = join_pass(p);
    struct room *room = room_at(room_of(p, thread.me) + p->result_bytes, p->room_rows, p->model->head_dim);
    if (!p->first) angles(&thread, p->model, p->step);
    for (int64_t half = p->first; half < p->end; half++) {
        const struct layer *layer = p->model->layers + half / 2;
        if (half % 2 == 0) first_half(&thread, p->model, layer, p->step);
        else if (second_half(&thread, p->model, layer, half + 1 < p->end ? layer + 1 : 0, p->step, room)) {
            p->failed = 1;
            break;
        }
    }
    if (!thread.me) p->met = thread.met;
    leave_tiles();
}

static void run_head(void *data) {
    struct pass *p = data;
    const struct model *m = p->model;
    const struct step *s = p->step;
    struct thread thread = join_pass(p);
    norm(&thread, m, s->x, p->picked, m->norm, 0, s->normed, s->rows);
    linear(&thread, (struct linear){.x = s->normed, .weight = &m->head, .out = p->logits + m->vocabulary.first,
                                    .stride = m->vocabulary.of, .rows = s->rows, .kind = WIDE});
    leave_tiles();
}

void tandem_init(parallel_fn parallel, int (*number)(void), int (*count)(void)) {
    run_parallel = parallel, thread_number = number, num_threads = count;
    ask_for_amx();
}

int64_t tandem_has_amx(void) { return has_amx; }

/* The sizes of the structs that Python has too, in the order of structs.py. */
const int64_t tandem_sizes[] = {sizeof(struct weight), sizeof(struct panel), sizeof(struct rare),
                                sizeof(struct experts), sizeof(struct mixture), sizeof(struct layer),
                                sizeof(struct ranks), sizeof(struct model), sizeof(struct lora_part),
                                sizeof(struct step), sizeof(struct draw)};

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Room for any piece's result: of a panel, of a few rows, of what an adapter adds to them. */
static int64_t result_bytes(const struct model *m, int64_t rows) {
    const struct mixture *x = m->mixture;
    const int64_t inner = most(m->intermediate, x ? x->inner : 0);
    const int64_t widest = most(most(2 * inner, m->hidden), row_width(m)) * (int64_t)sizeof(float);
    const int64_t found = most(rows * 32 * (int64_t)sizeof(float), ROWS_A_PIECE * widest);
    return (most(found, x ? most(groups_bytes(x, rows), x->per_token * 8) : 0) + 63) / 64 * 64;
}

/* The most pieces of the loops of experts. */
static int64_t expert_pieces(const struct model *m, int64_t rows) {
    const struct mixture *x = m->mixture;
    return x ? most(num_slots(x, rows) * most(2 * x->inner, m->hidden) / 32, rows * x->per_token) : 0;
}

/* Runs a pass in memory of its own; a loop has at most `pieces` pieces. Returns 0, or -1 without memory. */
static int64_t run_pass(void (*body)(void *), struct pass *p, int64_t pieces, int64_t threads) {
    p->result_bytes = result_bytes(p->model, p->step->rows);
    _Atomic uint32_t *won = calloc(pieces, sizeof *won);
    p->rooms = aligned_alloc(64, threads * (p->result_bytes + p->room_bytes));
    if (won && p->rooms) run(body, p, &p->team, won, threads);
    const int64_t status = won && p->rooms ? 0 : -1;
    free(p->rooms), free(won);
    return status;
}

/* Computes the halves of layers first ... end of a step. Returns 0, -1 without memory, or 1 where ranks have waited in
   vain. */
int64_t tandem_layers(const struct model *model, const struct step *step, int64_t first, int64_t end,
                      int64_t threads) {
    struct pass pass = {.model = model, .step = step, .first = first, .end = end};
    pass.room_bytes = (room_bytes(model, step, &pass.room_rows) + 63) / 64 * 64;
    int64_t parts = 0;
    for (int64_t i = 0; i < step->seqs; i++) parts += num_parts(model, step, i);
    const int64_t panels = most(most(2 * model->intermediate, model->hidden), row_width(model)) / 32;
    const int64_t pieces = most(most(panels, model->angles * step->rows), parts);
    const int64_t status = run_pass(run_halves, &pass, most(pieces, expert_pieces(model, step->rows)), threads);
    if (model->ranks && !status) *model->ranks->met = pass.met;
    return status ? status : pass.failed;
}

/* Logits (count, vocab) of the rows `picked` of step->x; step->normed is room for them. Returns 0 or -1. */
int64_t tandem_logits(const struct model *model, const struct step *step, const int64_t *picked, int64_t count,
                   float *logits, int64_t threads) {
    struct step rows = *step;
    rows.rows = count;
    struct pass pass = {.model = model, .step = &rows, .picked = picked, .logits = logits};
    return run_pass(run_head, &pass, most(model->head.outputs / 32, count), threads);
}
