/* The decoder's forward pass in bfloat16 for x86 CPUs with AVX512-BF16: sums in float32, one rounding at the end of each.

   forward    for each layer: norm, qkv, rope and write to the cache, attention, o, norm, gate-up-silu, down
   logits     norm and head of some rows

   A weight (outputs, inputs) is kept packed: panels of 32 outputs, one after the other, each (inputs / 2, 32, 2).
   One walk over a panel, which is one sequential stream, feeds up to 12 rows of x; so decode reads every weight once,
   and prefill, whose rows take many walks, finds the panel in the L2 cache. Attention packs keys and values alike.

   All layers run in one parallel region of torch's own OpenMP pool, so no second pool fights for cores. Its threads
   share each loop out among themselves, and who is done early takes work from the others: a core that another process
   borrowed for a moment holds nobody up for longer than one piece of work. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn run_parallel;
static int (*thread_number)(void), (*num_threads)(void);

void tandem_init(parallel_fn parallel, int (*number)(void), int (*count)(void)) {
    run_parallel = parallel, thread_number = number, num_threads = count;
}

/* ---- threads and the loops they share ---- */

enum { MAX_THREADS = 128, SPINS = 8192 };

struct pieces { _Alignas(64) _Atomic uint64_t left; }; /* of one thread: the first in the low half, the end in the high */

struct crew {
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int32_t rounds, asleep;
    struct pieces pieces[2][MAX_THREADS]; /* of this loop and the next, in turns */
};

struct hand { struct crew *crew; int64_t me, threads, turn; };

static struct hand join(struct crew *crew, int64_t threads) {
    return threads > 1 ? (struct hand){crew, thread_number(), num_threads(), 0} : (struct hand){crew, 0, 1, 0};
}

static void meet(const struct hand *h) {
    struct crew *c = h->crew;
    int32_t round = atomic_load(&c->rounds);
    if (atomic_fetch_add(&c->arrived, 1) + 1 == h->threads) {
        atomic_store(&c->arrived, 0);
        atomic_fetch_add(&c->rounds, 1);
        if (atomic_load(&c->asleep)) syscall(SYS_futex, &c->rounds, FUTEX_WAKE_PRIVATE, MAX_THREADS, 0, 0, 0);
        return;
    }
    for (int64_t spins = 0; atomic_load_explicit(&c->rounds, memory_order_acquire) == round; spins++) {
        if (spins < SPINS) {
            _mm_pause();
            continue;
        }
        /* Asleep, so that whoever keeps a thread of ours from running may come over to this core. */
        atomic_fetch_add(&c->asleep, 1);
        syscall(SYS_futex, &c->rounds, FUTEX_WAIT_PRIVATE, round, 0, 0, 0);
        atomic_fetch_sub(&c->asleep, 1);
    }
}

/* The loop before is over, for everyone; a loop of `count` pieces begins. */
static void begin(struct hand *h, int64_t count) {
    uint64_t first = count * h->me / h->threads, end = count * (h->me + 1) / h->threads;
    h->turn ^= 1;
    atomic_store(&h->crew->pieces[h->turn][h->me].left, end << 32 | first);
    if (h->threads > 1) meet(h);
}

/* The next piece: the first of one's own, then others' last ones; -1 when all are taken. `ahead`: the likely next one. */
static int64_t take(struct hand *h, int64_t *ahead) {
    for (int64_t i = 0; i < h->threads; i++) {
        _Atomic uint64_t *left = &h->crew->pieces[h->turn][(h->me + i) % h->threads].left;
        uint64_t seen = atomic_load(left);
        for (;;) {
            int64_t first = (int64_t)(seen & UINT32_MAX), end = (int64_t)(seen >> 32);
            if (first >= end) break;
            uint64_t after = i ? (uint64_t)(end - 1) << 32 | first : (uint64_t)end << 32 | (first + 1);
            if (!atomic_compare_exchange_weak(left, &seen, after)) continue;
            *ahead = end - first < 2 ? -1 : i ? end - 2 : first + 1;
            return i ? end - 1 : first;
        }
    }
    return -1;
}

/* ---- numbers ---- */

static inline __m512 load16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
static inline void store16(bf16 *p, __m512 x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

/* 2^n * p(r), within 2 units in the last place of float32. */
static inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* ---- packing ---- */

/* In place. Where `halves` is set the outputs are (gate | up), and each panel is 16 of gate and the same 16 of up. */
void tandem_pack(uint32_t *weight, int64_t outputs, int64_t inputs, int64_t halves) {
    const int64_t pairs = inputs / 2;
    uint32_t *rows = malloc(outputs * pairs * sizeof *rows);
    memcpy(rows, weight, outputs * pairs * sizeof *rows);
    for (int64_t panel = 0; panel < outputs / 32; panel++, weight += 32 * pairs)
        for (int64_t n = 0; n < 32; n++) {
            int64_t output = halves ? panel * 16 + n % 16 + n / 16 * (outputs / 2) : panel * 32 + n;
            for (int64_t k = 0; k < pairs; k++) weight[k * 32 + n] = rows[output * pairs + k];
        }
    free(rows);
}

/* Rows `ids` of a packed weight, as they were. */
void tandem_unpack_rows(const uint32_t *weight, const int64_t *ids, int64_t count, int64_t inputs, uint32_t *out) {
    for (int64_t row = 0; row < count; row++) {
        const uint32_t *from = weight + ids[row] / 32 * 32 * (inputs / 2) + ids[row] % 32;
        for (int64_t k = 0; k < inputs / 2; k++) *out++ = from[k * 32];
    }
}

/* ---- tiles: sums (COUNT, 32) = COUNT rows of x, `stride` pairs apart, times one panel of `pairs` pairs;
        meanwhile `lines` cache lines a step are asked for from `ahead` on ---- */

#define TILE(COUNT) \
    static void tile##COUNT(const int32_t *x, int64_t stride, const uint32_t *w, int64_t pairs, float *sums, \
                            const char *ahead, int lines) { \
        __m512 sum[COUNT][2]; \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps(); \
        for (int64_t k = 0; k < pairs; k++, w += 32) { \
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 16); \
            if (lines > 0) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
            if (lines > 1) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
            _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
                __m512bh a = (__m512bh)_mm512_set1_epi32(x[m * stride + k]); \
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, w0); \
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], a, w1); \
            } \
        } \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
            _mm512_storeu_ps(sums + m * 32, sum[m][0]); \
            _mm512_storeu_ps(sums + m * 32 + 16, sum[m][1]); \
        } \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)

enum { TILE_ROWS = 12 };
typedef void (*tile_fn)(const int32_t *, int64_t, const uint32_t *, int64_t, float *, const char *, int);
static const tile_fn tiles[] = {0, tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8, tile9, tile10, tile11, tile12};

static inline int64_t num_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* ---- linear ---- */

/* out = x weight^T (+ bias) (+ residual); WIDE: in float32; SILU: silu(gate) * up of outputs (gate | up) */
enum kind { PLAIN, WIDE, SILU };

struct linear {
    const bf16 *x, *weight, *bias, *residual;
    void *out;
    int64_t rows, inputs, outputs;
    enum kind kind;
};

static inline void finish16(const struct linear *j, int64_t row, int64_t column, __m512 sum) {
    int64_t at = row * j->outputs + column;
    if (j->bias) sum = _mm512_add_ps(sum, load16(j->bias + column));
    if (j->residual) sum = _mm512_add_ps(sum, load16(j->residual + at));
    if (j->kind == WIDE) _mm512_storeu_ps((float *)j->out + at, sum);
    else store16((bf16 *)j->out + at, sum);
}

static inline void finish_silu(const struct linear *j, int64_t row, int64_t column, __m512 gate, __m512 up) {
    const int64_t size = j->outputs / 2;
    if (j->bias) {
        gate = _mm512_add_ps(gate, load16(j->bias + column));
        up = _mm512_add_ps(up, load16(j->bias + size + column));
    }
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
    store16((bf16 *)j->out + row * size + column, _mm512_div_ps(_mm512_mul_ps(gate, up), below));
}

/* The panel `next`, if any, is fetched while the first tile (two, where there are more) of this one is computed. */
static void linear_panel(const struct linear *j, int64_t panel, int64_t next) {
    const int64_t pairs = j->inputs / 2, count = num_tiles(j->rows);
    const uint32_t *weights = (const uint32_t *)j->weight;
    const int lines = count > 1 ? 1 : 2;
    float sums[TILE_ROWS * 32];
    for (int64_t t = 0; t < count; t++) {
        const int64_t row = j->rows * t / count, rows = j->rows * (t + 1) / count - row;
        const int asked = next >= 0 && t * lines < 2 ? lines : 0;
        const char *ahead = (const char *)(weights + (next * 32 + t * 16) * pairs);
        tiles[rows]((const int32_t *)j->x + row * pairs, pairs, weights + panel * 32 * pairs, pairs, sums, ahead, asked);
        for (int64_t m = 0; m < rows; m++) {
            __m512 a = _mm512_loadu_ps(sums + m * 32), b = _mm512_loadu_ps(sums + m * 32 + 16);
            if (j->kind == SILU) finish_silu(j, row + m, panel * 16, a, b);
            else finish16(j, row + m, panel * 32, a), finish16(j, row + m, panel * 32 + 16, b);
        }
    }
}

static void linear(struct hand *h, struct linear job) {
    begin(h, job.outputs / 32);
    for (int64_t next, panel; (panel = take(h, &next)) >= 0;) linear_panel(&job, panel, next);
}

/* ---- norm, rope, cache ---- */

enum { ROWS_A_PIECE = 4 };

static inline void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t size, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) sum = _mm512_fmadd_ps(load16(x + i), load16(x + i), sum);
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16)
        store16(out + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i), scale), load16(weight + i)));
}

/* `picked`: which rows of x, one after the other; all of them where it is null. */
static void norm(struct hand *h, const bf16 *x, const int64_t *picked, const bf16 *weight, bf16 *out, int64_t rows,
                 int64_t size, float eps) {
    begin(h, (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE);
    for (int64_t next, piece; (piece = take(h, &next)) >= 0;)
        for (int64_t row = piece * ROWS_A_PIECE; row < rows && row < (piece + 1) * ROWS_A_PIECE; row++)
            norm_row(x + (picked ? picked[row] : row) * size, weight, out + row * size, size, eps);
}

struct layer {
    const bf16 *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
    bf16 *kv; /* (blocks, 2, kv_heads, block_size, head_dim) */
};

struct model {
    const struct layer *layers;
    const bf16 *norm, *head;
    int64_t hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size;
    float eps;
};

/* One step. `x` (rows, hidden) comes as embeddings and goes as hidden states; the others are room for the pass.
   Sequence s has rows starts[s] … starts[s + 1], the last of lengths[s] tokens in the blocks tables + table_starts[s]. */
struct step {
    bf16 *x, *normed, *qkv, *attended, *inner;
    const float *cos, *sin; /* (rows, head_dim / 2) */
    const int64_t *slots, *starts, *lengths, *table_starts;
    const int32_t *tables;
    int64_t rows, seqs;
};

static void turn(bf16 *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        __m512 a = load16(x + i), b = load16(x + half + i), c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
        store16(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store16(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

/* Norms (where there are weights) and turns the q and k heads of one row (q | k | v), then puts k and v into its slot. */
static void place_row(const struct model *m, const struct layer *l, const struct step *s, int64_t row) {
    const int64_t dim = m->head_dim, half = dim / 2, size = m->block_size;
    bf16 *x = s->qkv + row * (m->heads + 2 * m->kv_heads) * dim;
    for (int64_t head = 0; head < m->heads + m->kv_heads; head++, x += dim) {
        const bf16 *weight = head < m->heads ? l->q_norm : l->k_norm;
        if (weight) norm_row(x, weight, x, dim, m->eps);
        turn(x, s->cos + row * half, s->sin + row * half, half);
    }
    bf16 *to = l->kv + (s->slots[row] / size * 2 * m->kv_heads * size + s->slots[row] % size) * dim;
    for (int64_t head = 0; head < 2 * m->kv_heads; head++, to += size * dim)
        memcpy(to, x + (head - m->kv_heads) * dim, dim * sizeof *to);
}

static void place(struct hand *h, const struct model *m, const struct layer *l, const struct step *s) {
    begin(h, (s->rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE);
    for (int64_t next, piece; (piece = take(h, &next)) >= 0;)
        for (int64_t row = piece * ROWS_A_PIECE; row < s->rows && row < (piece + 1) * ROWS_A_PIECE; row++)
            place_row(m, l, s, row);
}

/* ---- attention: softmax over KEYS keys at a time, as in FlashAttention (arXiv 2205.14135) ---- */

enum { KEYS = 64, TOKENS = 64, MAX_DIM = 256 }; /* a piece of work: TOKENS tokens of a sequence, the heads of one KV head */

struct room { /* one thread's */
    bf16 *q;                   /* (rows, dim) */
    float *out, *best, *total; /* (rows, dim), (rows,), (rows,) */
    _Alignas(64) bf16 keys[KEYS * MAX_DIM], values[KEYS * MAX_DIM], k[KEYS * MAX_DIM], v[KEYS * MAX_DIM];
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

/* Keys first … first + count of one KV head, as panels; what is missing to KEYS is zero. */
static void pack_context(const struct model *m, const bf16 *kv, const int32_t *table, int64_t head, int64_t first,
                         int64_t count, struct room *r) {
    const int64_t dim = m->head_dim, size = m->block_size, bytes = dim * sizeof(bf16);
    for (int64_t t = 0, run; t < count; t += run) {
        int64_t offset = (first + t) % size;
        run = size - offset < count - t ? size - offset : count - t;
        const bf16 *from = kv + ((table[(first + t) / size] * 2 * m->kv_heads + head) * size + offset) * dim;
        memcpy(r->k + t * dim, from, run * bytes);
        memcpy(r->v + t * dim, from + m->kv_heads * size * dim, run * bytes);
    }
    memset(r->k + count * dim, 0, (KEYS - count) * bytes);
    memset(r->v + count * dim, 0, (KEYS - count) * bytes);
    for (int64_t t = 0; t < KEYS; t += 16)
        for (int64_t pair = 0; pair < dim / 2; pair += 16)
            transpose16((uint32_t *)r->k + t * dim / 2 + pair, dim / 2,
                        (uint32_t *)r->keys + t / 32 * 32 * dim / 2 + pair * 32 + t % 32, 32);
    for (int64_t i = 0; i < dim; i += 16)
        for (int64_t pair = 0; pair < KEYS / 2; pair++) {
            const bf16 *v = r->v + 2 * pair * dim + i;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)v));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(v + dim)));
            uint32_t *to = (uint32_t *)r->values + i / 32 * 32 * (KEYS / 2) + pair * 32 + i % 32;
            _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* Scores of a row (two tiles' parts of 32) become weights relative to the best score so far, of which `visible` count;
   returns what older sums are worth now. */
static float soften(const float *scores, int64_t visible, float scale, bf16 *weights, float *best, float *total) {
    __m512 score[4], mass = _mm512_setzero_ps(), high = _mm512_set1_ps(*best);
    for (int i = 0; i < 4; i++) {
        int64_t here = visible - 16 * i;
        __mmask16 seen = here >= 16 ? 0xffff : here <= 0 ? 0 : (__mmask16)((1u << here) - 1);
        score[i] = _mm512_mul_ps(_mm512_loadu_ps(scores + i / 2 * TILE_ROWS * 32 + i % 2 * 16), _mm512_set1_ps(scale));
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

/* `rows` rows from `row` on over the packed keys first … first + KEYS; row n sees positions up to `at` + n / share. */
static void attend_tile(struct room *r, int64_t row, int64_t rows, int64_t dim, int64_t share, int64_t at, int64_t first) {
    float scores[2 * TILE_ROWS * 32], sums[TILE_ROWS * 32], keep[TILE_ROWS];
    bf16 weights[TILE_ROWS * KEYS];
    for (int64_t half = 0; half < 2; half++)
        tiles[rows]((const int32_t *)(r->q + row * dim), dim / 2, (const uint32_t *)r->keys + half * 32 * dim / 2, dim / 2,
                    scores + half * TILE_ROWS * 32, 0, 0);
    for (int64_t n = 0; n < rows; n++) {
        int64_t visible = at + (row + n) / share - first + 1, i = row + n;
        keep[n] = soften(scores + n * 32, visible, 1.0f / sqrtf((float)dim), weights + n * KEYS, r->best + i, r->total + i);
    }
    for (int64_t i = 0; i < dim; i += 32) {
        tiles[rows]((const int32_t *)weights, KEYS / 2, (const uint32_t *)r->values + i * KEYS / 2, KEYS / 2, sums, 0, 0);
        for (int64_t n = 0; n < rows; n++)
            for (int64_t c = 0; c < 32; c += 16) {
                float *out = r->out + (row + n) * dim + i + c;
                __m512 old = first ? _mm512_loadu_ps(out) : _mm512_setzero_ps();
                _mm512_storeu_ps(out, _mm512_fmadd_ps(old, _mm512_set1_ps(keep[n]), _mm512_loadu_ps(sums + n * 32 + c)));
            }
    }
}

/* Tokens begin … end, of the step's rows, of sequence `seq`: the query heads that share KV head `head`. */
static void attend(const struct model *m, const struct layer *l, const struct step *s, struct room *r, int64_t seq,
                   int64_t head, int64_t begin, int64_t end) {
    const int64_t dim = m->head_dim, share = m->heads / m->kv_heads, width = share * dim, rows = (end - begin) * share;
    const int64_t at = s->lengths[seq] - (s->starts[seq + 1] - begin), keys = at + (end - begin);
    for (int64_t token = begin; token < end; token++)
        memcpy(r->q + (token - begin) * width, s->qkv + token * (m->heads + 2 * m->kv_heads) * dim + head * width,
               width * sizeof *r->q);
    for (int64_t row = 0; row < rows; row++) r->best[row] = -INFINITY, r->total[row] = 0;
    for (int64_t first = 0; first < keys; first += KEYS) {
        int64_t count = keys - first < KEYS ? keys - first : KEYS, tile_count = num_tiles(rows);
        pack_context(m, l->kv, s->tables + s->table_starts[seq], head, first, count, r);
        for (int64_t t = 0; t < tile_count; t++) {
            int64_t row = rows * t / tile_count, next = rows * (t + 1) / tile_count;
            if (first <= at + (next - 1) / share) attend_tile(r, row, next - row, dim, share, at, first);
        }
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < dim; i += 16)
            store16(s->attended + (begin + row / share) * m->heads * dim + head * width + row % share * dim + i,
                    _mm512_div_ps(_mm512_loadu_ps(r->out + row * dim + i), _mm512_set1_ps(r->total[row])));
}

static int64_t num_parts(const struct step *s, int64_t seq) {
    return (s->starts[seq + 1] - s->starts[seq] + TOKENS - 1) / TOKENS;
}

static void attention(struct hand *h, const struct model *m, const struct layer *l, const struct step *s, struct room *r) {
    int64_t pieces = 0, seq = 0, before = 0;
    for (int64_t i = 0; i < s->seqs; i++) pieces += num_parts(s, i) * m->kv_heads;
    begin(h, pieces);
    for (int64_t next, piece; (piece = take(h, &next)) >= 0;) {
        if (piece < before) seq = before = 0;
        for (int64_t here; piece >= before + (here = num_parts(s, seq) * m->kv_heads); seq++) before += here;
        int64_t first = s->starts[seq] + (piece - before) / m->kv_heads * TOKENS, end = s->starts[seq + 1];
        attend(m, l, s, r, seq, (piece - before) % m->kv_heads, first, first + TOKENS < end ? first + TOKENS : end);
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

/* ---- the passes ---- */

struct pass {
    const struct model *model;
    const struct step *step;
    int64_t first, end, threads; /* first … end: halves of layers */
    const int64_t *picked;       /* rows, for logits */
    float *logits;
    struct crew crew;
};

/* Until k and v of the layer are in the cache. */
static void first_half(struct hand *h, const struct model *m, const struct layer *l, const struct step *s) {
    const int64_t qkv = (m->heads + 2 * m->kv_heads) * m->head_dim, rows = s->rows;
    norm(h, s->x, 0, l->input_norm, s->normed, rows, m->hidden, m->eps);
    linear(h, (struct linear){s->normed, l->qkv, l->qkv_bias, 0, s->qkv, rows, m->hidden, qkv, PLAIN});
    place(h, m, l, s);
}

static void second_half(struct hand *h, const struct model *m, const struct layer *l, const struct step *s, struct room *r) {
    const int64_t heads = m->heads * m->head_dim, inner = m->intermediate, rows = s->rows;
    attention(h, m, l, s, r);
    linear(h, (struct linear){s->attended, l->o, l->o_bias, s->x, s->x, rows, heads, m->hidden, PLAIN});
    norm(h, s->x, 0, l->post_norm, s->normed, rows, m->hidden, m->eps);
    linear(h, (struct linear){s->normed, l->gate_up, l->gate_up_bias, 0, s->inner, rows, m->hidden, 2 * inner, SILU});
    linear(h, (struct linear){s->inner, l->down, l->down_bias, s->x, s->x, rows, inner, m->hidden, PLAIN});
}

static void run_halves(void *data) {
    struct pass *p = data;
    struct hand h = join(&p->crew, p->threads);
    struct room *room = make_room(p->model, p->step);
    for (int64_t half = p->first; half < p->end; half++) {
        const struct layer *layer = p->model->layers + half / 2;
        if (half % 2) second_half(&h, p->model, layer, p->step, room);
        else first_half(&h, p->model, layer, p->step);
    }
    free(room->out), free(room);
}

static void run_head(void *data) {
    struct pass *p = data;
    const struct model *m = p->model;
    const struct step *s = p->step;
    struct hand h = join(&p->crew, p->threads);
    norm(&h, s->x, p->picked, m->norm, s->normed, s->rows, m->hidden, m->eps);
    linear(&h, (struct linear){s->normed, m->head, 0, 0, p->logits, s->rows, m->hidden, m->vocab, WIDE});
}

static void run(void (*body)(void *), struct pass *p, int64_t threads) {
    p->threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    if (p->threads > 1) run_parallel(body, p, (unsigned)p->threads, 0);
    else body(p);
}

/* Halves of layers, first … end, of a step. */
void tandem_layers(const struct model *model, const struct step *step, int64_t first, int64_t end, int64_t threads) {
    struct pass pass = {.model = model, .step = step, .first = first, .end = end};
    run(run_halves, &pass, threads);
}

/* Logits (count, vocab) of the rows `picked` of step->x; step->normed is room for them. */
void tandem_logits(const struct model *model, const struct step *step, const int64_t *picked, int64_t count,
                   float *logits, int64_t threads) {
    struct step rows = *step;
    rows.rows = count;
    struct pass pass = {.model = model, .step = &rows, .picked = picked, .logits = logits};
    run(run_head, &pass, threads);
}
