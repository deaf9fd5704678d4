/* Linear layers and attention in float32, for x86 CPUs with AVX2 and FMA, or AVX512: a row comes to the same numbers,
   bit for bit, whatever rows lie beside it, whichever of them share a tile with it, and on any number of threads.

   dots     each lane adds up every LANES-th product of a row and another, then lanes are added: in one order
   linear   dots of DEPTH inputs at a time, each added to the sums of those before
   attend   softmax over KEYS keys at a time, as in FlashAttention (arXiv 2205.14135), counted from the context's first

   What a sum's order depends on is its length alone. Compile without contraction: each multiply-add is written out. */

#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define VECTOR(name) _mm512_##name##_ps
typedef __m512 vector;
typedef __mmask16 mask;
enum { LANES = 16, ROWS = 6 };
#else
#define VECTOR(name) _mm256_##name##_ps
typedef __m256 vector;
typedef __m256 mask;
enum { LANES = 8, ROWS = 3 };
#endif
enum { COLUMNS = 4, BLOCK = 12, DEPTH = 512, KEYS = 64, ROWS_A_PIECE = 48, MAX_DIM = 256 };
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- vectors ---- */

#ifdef __AVX512F__
/* Lanes first ... end. */
static inline mask lanes(int64_t first, int64_t end) {
    const int64_t low = first < 0 ? 0 : first > LANES ? LANES : first, high = end < 0 ? 0 : end > LANES ? LANES : end;
    return low < high ? (mask)((1u << high) - (1u << low)) : 0;
}
static inline vector load(mask m, const float *p) { return _mm512_maskz_loadu_ps(m, p); }
static inline void store(mask m, float *p, vector x) { _mm512_mask_storeu_ps(p, m, x); }
static inline vector chosen(mask m, vector x, vector other) { return _mm512_mask_mov_ps(other, m, x); }
static inline vector power_of_two(vector n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
static inline vector rounded(vector x) { return _mm512_roundscale_ps(x, 0); }
static inline __m256 halves_of(vector x, int high) {
    return high ? _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)) : _mm512_castps512_ps256(x);
}
static inline __m256 halves_added(vector x) { return _mm256_add_ps(halves_of(x, 0), halves_of(x, 1)); }
static inline __m256 higher_half(vector x) { return _mm256_max_ps(halves_of(x, 0), halves_of(x, 1)); }
static inline vector pairs(vector a, vector b, int high) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
}
#else
static inline mask lanes(int64_t first, int64_t end) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i low = _mm256_set1_epi32((int)(first < 0 ? 0 : least(first, LANES)));
    const __m256i high = _mm256_set1_epi32((int)(end < 0 ? 0 : least(end, LANES)));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(low, lane), _mm256_cmpgt_epi32(high, lane)));
}
static inline vector load(mask m, const float *p) { return _mm256_maskload_ps(p, _mm256_castps_si256(m)); }
static inline void store(mask m, float *p, vector x) { _mm256_maskstore_ps(p, _mm256_castps_si256(m), x); }
static inline vector chosen(mask m, vector x, vector other) { return _mm256_blendv_ps(other, x, m); }
static inline vector power_of_two(vector n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline vector rounded(vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline __m256 halves_added(vector x) { return x; }
static inline __m256 higher_half(vector x) { return x; }
static inline vector pairs(vector a, vector b, int high) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_castpd_ps(high ? _mm256_unpackhi_pd(x, y) : _mm256_unpacklo_pd(x, y));
}
#endif

static inline vector pairs_added(vector a, vector b) {
    return VECTOR(add)(VECTOR(unpacklo)(a, b), VECTOR(unpackhi)(a, b));
}

/* The sums of four vectors' lanes. */
static inline __m128 sums_of(vector a, vector b, vector c, vector d) {
    const vector ab = pairs_added(a, b), cd = pairs_added(c, d);
    const __m256 four = halves_added(VECTOR(add)(pairs(ab, cd, 0), pairs(ab, cd, 1)));
    return _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
}

static inline float sum_of(vector x) { return _mm_cvtss_f32(sums_of(x, x, x, x)); }

static inline float greatest_of(vector x) {
    const __m256 eight = higher_half(x);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* e^x of numbers up to 0: 2^n p(r), within 2 units in the last place; below -87 that of -87. */
static inline vector exp_of(vector x) {
    x = VECTOR(max)(x, VECTOR(set1)(-87.0f));
    const vector n = rounded(VECTOR(mul)(x, VECTOR(set1)(1.44269504f)));
    vector r = VECTOR(fnmadd)(n, VECTOR(set1)(0.693359375f), x), p = VECTOR(set1)(1.9875691500e-4f);
    r = VECTOR(fnmadd)(n, VECTOR(set1)(-2.12194440e-4f), r);
    p = VECTOR(fmadd)(p, r, VECTOR(set1)(1.3981999507e-3f));
    p = VECTOR(fmadd)(p, r, VECTOR(set1)(8.3334519073e-3f));
    p = VECTOR(fmadd)(p, r, VECTOR(set1)(4.1665795894e-2f));
    p = VECTOR(fmadd)(p, r, VECTOR(set1)(1.6666665459e-1f));
    p = VECTOR(fmadd)(p, r, VECTOR(set1)(5.0000001201e-1f));
    p = VECTOR(fmadd)(p, VECTOR(mul)(r, r), VECTOR(add)(r, VECTOR(set1)(1.0f)));
    return VECTOR(mul)(p, power_of_two(n));
}

/* ---- dots ---- */

/* One step of a tile: of all lanes, or of those in `m` where `part` is set. */
INLINE void step(const float *x, int64_t stride, const float *const *w, int64_t ahead, int64_t k, const int rows,
                 const int part, mask m, vector sum[ROWS][COLUMNS]) {
    vector a[ROWS];
    UNROLLED for (int n = 0; n < rows; n++)
        a[n] = part ? load(m, x + n * stride + k) : VECTOR(loadu)(x + n * stride + k);
    UNROLLED for (int i = 0; i < COLUMNS; i++) {
        const vector b = part ? load(m, w[i] + k) : VECTOR(loadu)(w[i] + k);
        _mm_prefetch((const char *)(w[i] + ahead + k), _MM_HINT_T0);
        UNROLLED for (int n = 0; n < rows; n++) sum[n][i] = VECTOR(fmadd)(a[n], b, sum[n][i]);
    }
}

/* Each of `rows` rows of x by COLUMNS others, over `count` numbers; those `ahead` of the others are fetched meanwhile. */
INLINE void dots(const float *x, int64_t stride, const float *const *w, int64_t ahead, int64_t count, const int rows,
                 __m128 *out) {
    vector sum[ROWS][COLUMNS];
    int64_t k = 0;
    UNROLLED for (int n = 0; n < rows; n++)
        UNROLLED for (int i = 0; i < COLUMNS; i++) sum[n][i] = VECTOR(setzero)();
    for (; k + LANES <= count; k += LANES) step(x, stride, w, ahead, k, rows, 0, lanes(0, LANES), sum);
    if (k < count) step(x, stride, w, ahead, k, rows, 1, lanes(0, count - k), sum);
    UNROLLED for (int n = 0; n < rows; n++) out[n] = sums_of(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
}

/* Calls a function that wants its number of rows, 1 ... ROWS, to be a constant. */
#ifdef __AVX512F__
#define WITH_ROWS(rows, call, ...) \
    switch (rows) { \
    case 1: call(1, __VA_ARGS__); break; \
    case 2: call(2, __VA_ARGS__); break; \
    case 3: call(3, __VA_ARGS__); break; \
    case 4: call(4, __VA_ARGS__); break; \
    case 5: call(5, __VA_ARGS__); break; \
    default: call(6, __VA_ARGS__); \
    }
#else
#define WITH_ROWS(rows, call, ...) \
    switch (rows) { \
    case 1: call(1, __VA_ARGS__); break; \
    case 2: call(2, __VA_ARGS__); break; \
    default: call(3, __VA_ARGS__); \
    }
#endif

/* ---- linear ---- */

/* out = x weight^T + bias. Rows of x and of the weight lie x_stride and weight_stride apart; bias may be null. */
struct linear {
    const float *x, *weight, *bias;
    float *out;
    int64_t rows, inputs, outputs, x_stride, weight_stride;
    int64_t each, ahead; /* outputs of a piece; how many further those lie that are fetched meanwhile */
    _Atomic int64_t next;
};

/* Rows from `row` on and `width` outputs from `column` on: adds the products of `count` inputs from k on. */
INLINE void linear_tile(const int rows, const struct linear *l, int64_t row, int64_t column, int64_t k, int64_t count) {
    const int64_t width = least(COLUMNS, l->outputs - column);
    const __m128i seen = _mm_cmpgt_epi32(_mm_set1_epi32((int)width), _mm_set_epi32(3, 2, 1, 0));
    const float *w[COLUMNS];
    __m128 sums[ROWS];
    for (int i = 0; i < COLUMNS; i++) w[i] = l->weight + (column + least(i, width - 1)) * l->weight_stride + k;
    dots(l->x + row * l->x_stride + k, l->x_stride, w, l->ahead * l->weight_stride, count, rows, sums);
    UNROLLED for (int n = 0; n < rows; n++) {
        float *out = l->out + (row + n) * l->outputs + column;
        if (k) sums[n] = _mm_add_ps(_mm_maskload_ps(out, seen), sums[n]);
        else if (l->bias) sums[n] = _mm_add_ps(_mm_maskload_ps(l->bias + column, seen), sums[n]);
        if (width == COLUMNS) _mm_storeu_ps(out, sums[n]);
        else _mm_maskstore_ps(out, seen, sums[n]);
    }
}

/* BLOCK rows stay in the first cache while a piece's outputs pass by. */
static void linear_piece(const struct linear *l, int64_t first, int64_t end) {
    for (int64_t k = 0; k < l->inputs; k += DEPTH)
        for (int64_t block = 0; block < l->rows; block += BLOCK)
            for (int64_t column = first; column < end; column += COLUMNS)
                for (int64_t row = block; row < least(block + BLOCK, l->rows); row += ROWS)
                    WITH_ROWS(least(ROWS, l->rows - row), linear_tile, l, row, column, k, least(DEPTH, l->inputs - k))
}

static void linear_pieces(void *data) {
    struct linear *l = data;
    for (int64_t first; (first = atomic_fetch_add(&l->next, l->each)) < l->outputs;)
        linear_piece(l, first, least(first + l->each, l->outputs));
}

/* ---- attention ---- */

/* Of a step: sequence s has rows starts[s] ... starts[s + 1] of q and out (rows, heads, dim), the last of its lengths[s]
   tokens, whose KV lies in the blocks from tables[table_starts[s]] on. kernels.py has the same struct. */
struct attention {
    const int64_t *starts, *lengths, *table_starts;
    const int32_t *tables;
    int64_t seqs, heads, kv_heads, dim, block_size;
    int64_t block_stride, value_stride; /* numbers between two blocks, and between keys and values */
    /* Of a layer. Its cache is (blocks, 2, kv_heads, block_size, dim); window: tokens that one sees; 0: all. */
    const float *q, *kv;
    float *out;
    int64_t window;
    _Atomic int64_t next;
};

struct room { /* a piece's; a row is one query head of one token */
    _Alignas(64) float q[ROWS_A_PIECE * MAX_DIM], out[ROWS_A_PIECE * MAX_DIM], scores[ROWS * KEYS];
    float best[ROWS_A_PIECE], total[ROWS_A_PIECE];
    const float *keys[KEYS], *values[KEYS];
};

/* Scores of KEYS keys, of which first ... end are seen, become weights relative to the best score so far; returns what
   older sums are worth now. */
static float soften(float *scores, int64_t first, int64_t end, float *best, float *total) {
    vector high = VECTOR(set1)(*best), mass = VECTOR(setzero)();
    for (int64_t i = 0; i < KEYS; i += LANES)
        high = VECTOR(max)(high, chosen(lanes(first - i, end - i), VECTOR(load)(scores + i), high));
    const float top = greatest_of(high), keep = top == *best ? 1.0f : expf(*best - top);
    for (int64_t i = 0; i < KEYS; i += LANES) {
        const vector weight = exp_of(VECTOR(sub)(VECTOR(load)(scores + i), VECTOR(set1)(top)));
        const vector seen = chosen(lanes(first - i, end - i), weight, VECTOR(setzero)());
        VECTOR(store)(scores + i, seen);
        mass = VECTOR(add)(mass, seen);
    }
    *best = top, *total = *total * keep + sum_of(mass);
    return keep;
}

/* Scores of a tile's rows with the first `count` keys. */
INLINE void score_tile(const int rows, struct room *r, const float *q, int64_t dim, int64_t count) {
    __m128 sums[ROWS];
    for (int64_t key = 0; key < count; key += COLUMNS) {
        dots(q, dim, r->keys + key, 0, dim, rows, sums);
        UNROLLED for (int n = 0; n < rows; n++) _mm_store_ps(r->scores + n * KEYS + key, sums[n]);
    }
}

/* out = out keep + weights values: `width` vectors of columns, the last of which has lanes `m`. */
INLINE void add_columns(const int rows, const int width, mask m, const struct room *r, int64_t column, int64_t dim,
                        int64_t count, const float *keep, float *out) {
    vector sum[ROWS][COLUMNS];
    UNROLLED for (int n = 0; n < rows; n++)
        UNROLLED for (int i = 0; i < width; i++) sum[n][i] = VECTOR(setzero)();
    for (int64_t key = 0; key < count; key++) {
        vector a[ROWS];
        UNROLLED for (int n = 0; n < rows; n++) a[n] = VECTOR(set1)(r->scores[n * KEYS + key]);
        UNROLLED for (int i = 0; i < width; i++) {
            const float *v = r->values[key] + column + i * LANES;
            const vector b = width == 1 ? load(m, v) : VECTOR(loadu)(v);
            UNROLLED for (int n = 0; n < rows; n++) sum[n][i] = VECTOR(fmadd)(a[n], b, sum[n][i]);
        }
    }
    UNROLLED for (int n = 0; n < rows; n++)
        UNROLLED for (int i = 0; i < width; i++) {
            float *to = out + n * dim + column + i * LANES;
            const vector before = width == 1 ? load(m, to) : VECTOR(loadu)(to);
            sum[n][i] = VECTOR(fmadd)(before, VECTOR(set1)(keep[n]), sum[n][i]);
            if (width == 1) store(m, to, sum[n][i]);
            else VECTOR(storeu)(to, sum[n][i]);
        }
}

INLINE void add_values(const int rows, const struct room *r, int64_t dim, int64_t count, const float *keep,
                       float *out) {
    int64_t column = 0;
    for (; column + COLUMNS * LANES <= dim; column += COLUMNS * LANES)
        add_columns(rows, COLUMNS, lanes(0, LANES), r, column, dim, count, keep, out);
    for (; column < dim; column += LANES)
        add_columns(rows, 1, lanes(0, dim - column), r, column, dim, count, keep, out);
}

/* Where `count` keys and values from token `first` of a sequence's context on lie; the last one fills the last tile. */
static void find_context(const struct attention *a, int64_t seq, int64_t head, int64_t first, int64_t count,
                         struct room *r) {
    const int64_t size = a->block_size, head_size = size * a->dim;
    for (int64_t i = 0; i < (count + COLUMNS - 1) / COLUMNS * COLUMNS; i++) {
        const int64_t token = first + least(i, count - 1), block = a->tables[a->table_starts[seq] + token / size];
        r->keys[i] = a->kv + block * a->block_stride + head * head_size + token % size * a->dim;
        r->values[i] = r->keys[i] + a->value_stride;
    }
}

/* ROWS_A_PIECE rows of a sequence and a KV head, or as many as there are, from `begin` on. */
static void attend_piece(const struct attention *a, int64_t seq, int64_t head, int64_t begin) {
    const int64_t share = a->heads / a->kv_heads, dim = a->dim, tokens = a->starts[seq + 1] - a->starts[seq];
    const int64_t rows = least(ROWS_A_PIECE, tokens * share - begin), before = a->lengths[seq] - tokens;
    const int64_t end = before + (begin + rows - 1) / share + 1, seen = before + begin / share + 1 - a->window;
    const vector scale = VECTOR(set1)(1.0f / sqrtf((float)dim));
    struct room r;
    memset(r.scores, 0, sizeof r.scores);
    memset(r.out, 0, rows * dim * sizeof *r.out);
    for (int64_t n = 0; n < rows; n++) {
        const int64_t row = begin + n, at = (a->starts[seq] + row / share) * a->heads + head * share + row % share;
        for (int64_t i = 0; i < dim; i += LANES) {
            const mask m = lanes(0, dim - i);
            store(m, r.q + n * dim + i, VECTOR(mul)(load(m, a->q + at * dim + i), scale));
        }
        r.best[n] = -INFINITY, r.total[n] = 0;
    }
    for (int64_t first = a->window && seen > 0 ? seen / KEYS * KEYS : 0; first < end; first += KEYS) {
        const int64_t count = least(KEYS, end - first);
        find_context(a, seq, head, first, count, &r);
        for (int64_t row = 0, tile; row < rows; row += tile) {
            float keep[ROWS];
            tile = least(ROWS, rows - row);
            WITH_ROWS(tile, score_tile, &r, r.q + row * dim, dim, count)
            for (int64_t n = 0; n < tile; n++) {
                const int64_t visible = before + (begin + row + n) / share + 1 - first;
                keep[n] = soften(r.scores + n * KEYS, a->window ? visible - a->window : 0, visible, r.best + row + n,
                                 r.total + row + n);
            }
            WITH_ROWS(tile, add_values, &r, dim, count, keep, r.out + row * dim)
        }
    }
    for (int64_t n = 0; n < rows; n++) {
        const int64_t row = begin + n, at = (a->starts[seq] + row / share) * a->heads + head * share + row % share;
        for (int64_t i = 0; i < dim; i += LANES) {
            const mask m = lanes(0, dim - i);
            store(m, a->out + at * dim + i, VECTOR(div)(load(m, r.out + n * dim + i), VECTOR(set1)(r.total[n])));
        }
    }
}

static int64_t pieces_of(const struct attention *a, int64_t seq) {
    const int64_t rows = (a->starts[seq + 1] - a->starts[seq]) * (a->heads / a->kv_heads);
    return (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE * a->kv_heads;
}

static void attend_pieces(void *data) {
    struct attention *a = data;
    for (int64_t seq = 0, before = 0;;) {
        const int64_t piece = atomic_fetch_add(&a->next, 1);
        for (; seq < a->seqs && piece - before >= pieces_of(a, seq); seq++) before += pieces_of(a, seq);
        if (seq == a->seqs) return;
        attend_piece(a, seq, (piece - before) % a->kv_heads, (piece - before) / a->kv_heads * ROWS_A_PIECE);
    }
}

/* ---- called from Python ---- */

const int64_t tandem_attention_size = sizeof(struct attention);

static void (*run_parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static void run(void (*body)(void *), void *data, int64_t threads) {
    if (threads > 1) run_parallel(body, data, (unsigned)threads, 0);
    else body(data);
}

void tandem_init(void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) { run_parallel = parallel; }

void tandem_linear(const float *x, const float *weight, const float *bias, float *out, int64_t rows, int64_t inputs,
                   int64_t outputs, int64_t x_stride, int64_t weight_stride, int64_t threads) {
    enum { MOST = 128 }; /* of DEPTH inputs each: what the second cache holds */
    const int64_t share = (outputs + 4 * threads * COLUMNS - 1) / (4 * threads * COLUMNS) * COLUMNS;
    struct linear l = {x, weight, bias, out, rows, inputs, outputs, x_stride, weight_stride,
                       least(share, MOST), COLUMNS * (inputs < DEPTH ? DEPTH / inputs : 1), 0};
    run(linear_pieces, &l, threads);
}

void tandem_attend(const struct attention *step, const float *q, const float *kv, float *out, int64_t window,
                   int64_t threads) {
    struct attention a = *step;
    a.q = q, a.kv = kv, a.out = out, a.window = window, a.next = 0;
    run(attend_pieces, &a, threads);
}
