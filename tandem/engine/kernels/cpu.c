/* The decoder's bfloat16 arithmetic for x86 CPUs with AVX512-BF16: sums in float32, one rounding at the end.

   A weight (outputs, inputs) is kept packed: panels of 32 outputs, one after the other, each (inputs / 2, 32, 2).
   One walk over a panel, which is one sequential stream, feeds up to 12 rows of x; so decode reads every weight once,
   and prefill, whose rows take many walks, finds the panel in the L2 cache.

   Every entry splits its work over `threads` threads of torch's own OpenMP pool, so no second pool fights for cores. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

static parallel_fn run_parallel;
static int (*thread_number)(void), (*num_threads)(void);

void tandem_init(parallel_fn parallel, int (*number)(void), int (*count)(void)) {
    run_parallel = parallel, thread_number = number, num_threads = count;
}

/* One parallel loop: body(job, begin, end) over equal parts of 0 … count. */
struct loop { void (*body)(const void *, int64_t, int64_t); const void *job; int64_t count, threads; };

static void part(void *data) {
    const struct loop *l = data;
    int64_t me = l->threads > 1 ? thread_number() : 0;
    int64_t all = l->threads > 1 ? num_threads() : 1; /* the pool may give fewer than it was asked for */
    l->body(l->job, l->count * me / all, l->count * (me + 1) / all);
}

static void parallel_for(void (*body)(const void *, int64_t, int64_t), const void *job, int64_t count, int64_t threads) {
    struct loop l = {body, job, count, threads < count ? threads : count};
    if (l.threads > 1) run_parallel(part, &l, (unsigned)l.threads, 0);
    else if (count > 0) l.threads = 1, part(&l);
}

static inline float widen(bf16 x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
static inline __m512 load16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
static inline void store16(bf16 *p, __m512 x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

/* exp for x <= 0: 2^n * p(r), within 2 units in the last place of float32. */
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

/* ---- packing: in place, panel by panel ---- */

struct pack { uint32_t *weight; int64_t pairs; };

static void pack_panels(const void *job, int64_t begin, int64_t end) {
    const struct pack *j = job;
    uint32_t *rows = malloc(32 * j->pairs * sizeof *rows);
    for (int64_t panel = begin; panel < end; panel++) {
        uint32_t *here = j->weight + panel * 32 * j->pairs;
        memcpy(rows, here, 32 * j->pairs * sizeof *rows);
        for (int64_t k = 0; k < j->pairs; k++)
            for (int64_t n = 0; n < 32; n++) here[k * 32 + n] = rows[n * j->pairs + k];
    }
    free(rows);
}

void tandem_pack(uint32_t *weight, int64_t outputs, int64_t inputs, int64_t threads) {
    struct pack job = {weight, inputs / 2};
    parallel_for(pack_panels, &job, outputs / 32, threads);
}

/* Rows `ids` of a packed weight, as they were. */
void tandem_unpack_rows(const uint32_t *weight, const int64_t *ids, int64_t count, int64_t inputs, uint32_t *out) {
    for (int64_t row = 0; row < count; row++) {
        const uint32_t *from = weight + ids[row] / 32 * 32 * (inputs / 2) + ids[row] % 32;
        for (int64_t k = 0; k < inputs / 2; k++) *out++ = from[k * 32];
    }
}

/* ---- linear: out = x weight^T (+ bias) (+ residual) ---- */

struct linear {
    const bf16 *x, *weight, *bias, *residual;
    void *out;
    int64_t rows, inputs, outputs, wide; /* wide: out is float32 */
};

static inline void finish(const struct linear *j, int64_t row, int64_t column, __m512 sum) {
    int64_t at = row * j->outputs + column;
    if (j->bias) sum = _mm512_add_ps(sum, load16(j->bias + column));
    if (j->residual) sum = _mm512_add_ps(sum, load16(j->residual + at));
    if (j->wide) _mm512_storeu_ps((float *)j->out + at, sum);
    else store16((bf16 *)j->out + at, sum);
}

/* COUNT rows of x times one panel, meanwhile asking for `lines` cache lines a step from `ahead` on. */
#define TILE(COUNT) \
    static void tile##COUNT(const struct linear *j, int64_t row, int64_t panel, const char *ahead, int lines) { \
        const int64_t pairs = j->inputs / 2; \
        const uint32_t *w = (const uint32_t *)j->weight + panel * 32 * pairs; \
        const int32_t *x = (const int32_t *)j->x + row * pairs; \
        __m512 sum[COUNT][2]; \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) sum[m][0] = sum[m][1] = _mm512_setzero_ps(); \
        for (int64_t k = 0; k < pairs; k++, w += 32) { \
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 16); \
            if (lines > 0) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
            if (lines > 1) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64; \
            _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
                __m512bh a = (__m512bh)_mm512_set1_epi32(x[m * pairs + k]); \
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, w0); \
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], a, w1); \
            } \
        } \
        _Pragma("GCC unroll 12") for (int m = 0; m < COUNT; m++) { \
            finish(j, row + m, panel * 32, sum[m][0]); \
            finish(j, row + m, panel * 32 + 16, sum[m][1]); \
        } \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)

typedef void (*tile_fn)(const struct linear *, int64_t, int64_t, const char *, int);
static const tile_fn tiles[] = {0, tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8, tile9, tile10, tile11, tile12};

/* The next panel is fetched while the first tile (two, where there are more) of this one is computed. */
static void linear_panels(const void *job, int64_t begin, int64_t end) {
    const struct linear *j = job;
    const int64_t num_tiles = (j->rows + 11) / 12, panel_bytes = 64 * j->inputs;
    const int lines = num_tiles > 1 ? 1 : 2;
    for (int64_t panel = begin; panel < end; panel++) {
        const char *ahead = (const char *)j->weight + (panel + 1) * panel_bytes;
        for (int64_t t = 0; t < num_tiles; t++) {
            int64_t row = j->rows * t / num_tiles, next = j->rows * (t + 1) / num_tiles;
            int asked = panel + 1 < end && t * lines < 2 ? lines : 0;
            tiles[next - row](j, row, panel, ahead + t * panel_bytes / 2, asked);
        }
    }
}

void tandem_linear(const bf16 *x, const bf16 *weight, const bf16 *bias, const bf16 *residual, void *out, int64_t rows,
                   int64_t inputs, int64_t outputs, int64_t wide, int64_t threads) {
    struct linear job = {x, weight, bias, residual, out, rows, inputs, outputs, wide};
    parallel_for(linear_panels, &job, outputs / 32, threads);
}

/* ---- what goes on between the linears ---- */

static inline float mean_square(const bf16 *x, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) sum = _mm512_fmadd_ps(load16(x + i), load16(x + i), sum);
    return _mm512_reduce_add_ps(sum) / (float)size;
}

static inline void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t size, float eps) {
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(mean_square(x, size) + eps));
    for (int64_t i = 0; i < size; i += 16)
        store16(out + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i), scale), load16(weight + i)));
}

struct norm { const bf16 *x, *weight; bf16 *out; int64_t size; float eps; };

static void norm_rows(const void *job, int64_t begin, int64_t end) {
    const struct norm *j = job;
    for (int64_t row = begin; row < end; row++)
        norm_row(j->x + row * j->size, j->weight, j->out + row * j->size, j->size, j->eps);
}

void tandem_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t size, float eps,
                     int64_t threads) {
    struct norm job = {x, weight, out, size, eps};
    parallel_for(norm_rows, &job, rows, rows * size < 16384 ? 1 : threads);
}

struct silu { const bf16 *gate_up; bf16 *out; int64_t size; };

static void silu_rows(const void *job, int64_t begin, int64_t end) {
    const struct silu *j = job;
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t row = begin; row < end; row++) {
        const bf16 *gate = j->gate_up + row * 2 * j->size;
        for (int64_t i = 0; i < j->size; i += 16) {
            __m512 g = load16(gate + i), e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
            __m512 up = load16(gate + j->size + i);
            store16(j->out + row * j->size + i, _mm512_div_ps(_mm512_mul_ps(g, up), _mm512_add_ps(one, e)));
        }
    }
}

void tandem_silu_mul(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t size, int64_t threads) {
    struct silu job = {gate_up, out, size};
    parallel_for(silu_rows, &job, rows, rows * size < 16384 ? 1 : threads);
}

/* Norm (where there are weights) and turn the q and k heads of rows (q | k | v), in place. */
struct rope {
    bf16 *qkv;
    const bf16 *q_norm, *k_norm;
    const float *cos, *sin;
    int64_t heads, kv_heads, head_dim;
    float eps;
};

static void rope_rows(const void *job, int64_t begin, int64_t end) {
    const struct rope *j = job;
    const int64_t half = j->head_dim / 2;
    for (int64_t row = begin; row < end; row++) {
        const float *cos = j->cos + row * half, *sin = j->sin + row * half;
        bf16 *x = j->qkv + row * (j->heads + 2 * j->kv_heads) * j->head_dim;
        for (int64_t head = 0; head < j->heads + j->kv_heads; head++, x += j->head_dim) {
            const bf16 *weight = head < j->heads ? j->q_norm : j->k_norm;
            if (weight) norm_row(x, weight, x, j->head_dim, j->eps);
            for (int64_t i = 0; i < half; i += 16) {
                __m512 a = load16(x + i), b = load16(x + half + i);
                __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
                store16(x + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store16(x + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
        }
    }
}

void tandem_rope(bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, const float *cos, const float *sin, int64_t rows,
                 int64_t heads, int64_t kv_heads, int64_t head_dim, float eps, int64_t threads) {
    struct rope job = {qkv, q_norm, k_norm, cos, sin, heads, kv_heads, head_dim, eps};
    parallel_for(rope_rows, &job, rows, rows * heads * head_dim < 16384 ? 1 : threads);
}

/* ---- the paged cache: (blocks, 2, kv_heads, block_size, head_dim) ---- */

/* Rows of k and v, `stride` elements apart, into slots (block * block_size + offset) of the cache. */
void tandem_write_kv(bf16 *kv, const int64_t *slots, const bf16 *k, const bf16 *v, int64_t rows, int64_t stride,
                     int64_t kv_heads, int64_t block_size, int64_t head_dim) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
            bf16 *to = kv + ((block * 2 * kv_heads + head) * block_size + offset) * head_dim;
            int64_t from = row * stride + head * head_dim;
            memcpy(to, k + from, head_dim * sizeof *to);
            memcpy(to + kv_heads * block_size * head_dim, v + from, head_dim * sizeof *to);
        }
}

struct attend {
    const bf16 *q, *kv;
    const int32_t *tables; /* every row's blocks, one after the other; starts (rows,) says where */
    const int64_t *starts, *lengths;
    bf16 *out;
    int64_t stride, heads, kv_heads, block_size, head_dim;
};

enum { MAX_SHARE = 16, MAX_DIM = 256, STEP = 32 };

/* The sums of 16 vectors, as one vector. */
static inline __m512 reduce16(const __m512 *x) {
    __m512 quad[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]),
                                  _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
        __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
        quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    }
    __m512 lo = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
    __m512 hi = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(lo, hi, 0x88), _mm512_shuffle_f32x4(lo, hi, 0xdd));
}

/* q times up to 16 keys. */
static inline __attribute__((always_inline)) __m512 dot16(const bf16 *q, const bf16 *k, int64_t count, int64_t dim) {
    __m512 sum[16];
    _Pragma("GCC unroll 16") for (int t = 0; t < 16; t++) {
        const bf16 *key = k + (t < count ? t : count - 1) * dim; /* what is too many is masked by the caller */
        sum[t] = _mm512_setzero_ps();
        for (int64_t i = 0; i < dim; i += 32)
            sum[t] = _mm512_dpbf16_ps(sum[t], (__m512bh)_mm512_loadu_si512(q + i),
                                      (__m512bh)_mm512_loadu_si512(key + i));
    }
    return reduce16(sum);
}

/* Scores of one block become weights relative to the best score so far; returns what older sums are worth now. */
static inline float soften(float *scores, int64_t count, float *best, float *total) {
    __m512 high = _mm512_set1_ps(*best), mass = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += 16) high = _mm512_max_ps(high, _mm512_loadu_ps(scores + t));
    float top = _mm512_reduce_max_ps(high), keep = top == *best ? 1.0f : expf(*best - top);
    for (int64_t t = 0; t < count; t += 16) {
        __mmask16 real = count - t < 16 ? (__mmask16)((1u << (count - t)) - 1) : 0xffff;
        __m512 value = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), _mm512_set1_ps(top)));
        value = _mm512_maskz_mov_ps(real, value);
        _mm512_storeu_ps(scores + t, value);
        mass = _mm512_add_ps(mass, value);
    }
    *best = top, *total = *total * keep + _mm512_reduce_add_ps(mass);
    return keep;
}

/* sum = sum * keep + weights times the values; up to 64 channels at a time stay in registers. */
static inline __attribute__((always_inline)) void add_values(float *sum, float keep, const float *weights,
                                                             const float *values, int64_t count, int64_t dim) {
    const int chains = dim % 64 ? 2 : 4;
    for (int64_t i = 0; i < dim; i += 16 * chains) {
        __m512 acc[4];
        for (int c = 0; c < chains; c++) acc[c] = _mm512_mul_ps(_mm512_loadu_ps(sum + i + 16 * c), _mm512_set1_ps(keep));
        for (int64_t t = 0; t < count; t++)
            for (int c = 0; c < chains; c++)
                acc[c] = _mm512_fmadd_ps(_mm512_set1_ps(weights[t]), _mm512_loadu_ps(values + t * dim + i + 16 * c), acc[c]);
        for (int c = 0; c < chains; c++) _mm512_storeu_ps(sum + i + 16 * c, acc[c]);
    }
}

/* The query heads of one row that share KV head `head`: softmax over the context, STEP tokens of a block at a time. */
static inline __attribute__((always_inline)) void attend_one(const struct attend *j, int64_t row, int64_t head,
                                                             int64_t dim) {
    const int64_t share = j->heads / j->kv_heads, size = j->block_size, length = j->lengths[row];
    const bf16 *q = j->q + row * j->stride + head * share * dim;
    const float scale = 1.0f / sqrtf((float)dim);
    float sum[MAX_SHARE][MAX_DIM], best[MAX_SHARE], total[MAX_SHARE], scores[STEP], values[STEP * MAX_DIM];
    for (int64_t s = 0; s < share; s++) {
        best[s] = -INFINITY, total[s] = 0;
        memset(sum[s], 0, dim * sizeof(float));
    }
    for (int64_t done = 0, count; done < length; done += count) {
        const int64_t left = size - done % size;
        count = length - done < left ? length - done : left;
        count = count < STEP ? count : STEP;
        const bf16 *block = j->kv + (j->tables[j->starts[row] + done / size] * 2 * j->kv_heads + head) * size * dim;
        const bf16 *k = block + done % size * dim, *v = k + j->kv_heads * size * dim;
        for (int64_t i = 0; i < count * dim; i += 16) _mm512_storeu_ps(values + i, load16(v + i));
        for (int64_t s = 0; s < share; s++) {
            for (int64_t t = 0; t < count; t += 16) {
                __mmask16 real = count - t < 16 ? (__mmask16)((1u << (count - t)) - 1) : 0xffff;
                __m512 dots = _mm512_mul_ps(dot16(q + s * dim, k + t * dim, count - t, dim), _mm512_set1_ps(scale));
                _mm512_storeu_ps(scores + t, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), real, dots));
            }
            float keep = soften(scores, count, best + s, total + s);
            add_values(sum[s], keep, scores, values, count, dim);
        }
    }
    for (int64_t s = 0; s < share; s++)
        for (int64_t i = 0; i < dim; i += 16)
            store16(j->out + (row * j->heads + head * share + s) * dim + i,
                    _mm512_div_ps(_mm512_loadu_ps(sum[s] + i), _mm512_set1_ps(total[s])));
}

static void attend_tasks(const void *job, int64_t begin, int64_t end) {
    const struct attend *j = job;
    for (int64_t task = begin; task < end; task++) {
        int64_t row = task / j->kv_heads, head = task % j->kv_heads;
        if (j->head_dim == 64) attend_one(j, row, head, 64);
        else if (j->head_dim == 128) attend_one(j, row, head, 128);
        else attend_one(j, row, head, j->head_dim);
    }
}

void tandem_attention(const bf16 *q, const bf16 *kv, const int32_t *tables, const int64_t *starts,
                      const int64_t *lengths, bf16 *out, int64_t rows, int64_t stride, int64_t heads, int64_t kv_heads,
                      int64_t block_size, int64_t head_dim, int64_t threads) {
    struct attend job = {q, kv, tables, starts, lengths, out, stride, heads, kv_heads, block_size, head_dim};
    parallel_for(attend_tasks, &job, rows * kv_heads, threads);
}
