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

enum { MAX_SHARE = 16, MAX_VECTORS = 16, MAX_BLOCK = 256 };

/* The query heads of one row that share KV head `head`: softmax over the context, one block at a time. */
static void attend_one(const struct attend *j, int64_t row, int64_t head) {
    const int64_t dim = j->head_dim, vectors = dim / 16, share = j->heads / j->kv_heads, size = j->block_size;
    const int64_t first = head * share, half = j->kv_heads * size * dim;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)dim));
    __m512 q[MAX_SHARE][MAX_VECTORS], sum[MAX_SHARE][MAX_VECTORS];
    float best[MAX_SHARE], total[MAX_SHARE], scores[MAX_SHARE][MAX_BLOCK];
    memset(scores, 0, sizeof scores[0] * ((share + 3) / 4 * 4));
    memset(sum, 0, sizeof sum);
    for (int64_t s = 0; s < share; s++) {
        best[s] = -INFINITY, total[s] = 0;
        for (int64_t i = 0; i < vectors; i++) {
            q[s][i] = _mm512_mul_ps(load16(j->q + row * j->stride + (first + s) * dim + i * 16), scale);
        }
    }
    const int32_t *table = j->tables + j->starts[row];
    for (int64_t done = 0; done < j->lengths[row]; done += size, table++) {
        const int64_t count = j->lengths[row] - done < size ? j->lengths[row] - done : size;
        const bf16 *k = j->kv + (*table * 2 * j->kv_heads + head) * size * dim, *v = k + half;
        for (int64_t t = 0; t < count; t++) {
            __m512 key[MAX_VECTORS];
            for (int64_t i = 0; i < vectors; i++) key[i] = load16(k + t * dim + i * 16);
            for (int64_t s = 0; s < share; s++) {
                __m512 dot = _mm512_mul_ps(q[s][0], key[0]);
                for (int64_t i = 1; i < vectors; i++) dot = _mm512_fmadd_ps(q[s][i], key[i], dot);
                scores[s][t] = _mm512_reduce_add_ps(dot);
            }
        }
        for (int64_t s = 0; s < share; s++) {
            __m512 high = _mm512_set1_ps(best[s]), mass = _mm512_setzero_ps();
            for (int64_t t = 0; t < count; t += 16) {
                __mmask16 real = count - t < 16 ? (__mmask16)((1u << (count - t)) - 1) : 0xffff;
                high = _mm512_mask_max_ps(high, real, high, _mm512_maskz_loadu_ps(real, scores[s] + t));
            }
            float top = _mm512_reduce_max_ps(high);
            for (int64_t t = 0; t < count; t += 16) {
                __mmask16 real = count - t < 16 ? (__mmask16)((1u << (count - t)) - 1) : 0xffff;
                __m512 value = _mm512_maskz_loadu_ps(real, scores[s] + t);
                value = _mm512_maskz_mov_ps(real, exp16(_mm512_sub_ps(value, _mm512_set1_ps(top))));
                _mm512_mask_storeu_ps(scores[s] + t, real, value);
                mass = _mm512_add_ps(mass, value);
            }
            float keep = top == best[s] ? 1.0f : expf(best[s] - top);
            best[s] = top, total[s] = total[s] * keep + _mm512_reduce_add_ps(mass);
            for (int64_t i = 0; i < vectors; i++) sum[s][i] = _mm512_mul_ps(sum[s][i], _mm512_set1_ps(keep));
        }
        for (int64_t i = 0; i < vectors; i++)
            for (int64_t s = 0; s < share; s += 4) { /* four chains, so that none waits for itself */
                __m512 a = sum[s][i], b = sum[s + 1][i], c = sum[s + 2][i], d = sum[s + 3][i];
                for (int64_t t = 0; t < count; t++) {
                    __m512 value = load16(v + t * dim + i * 16);
                    a = _mm512_fmadd_ps(_mm512_set1_ps(scores[s][t]), value, a);
                    b = _mm512_fmadd_ps(_mm512_set1_ps(scores[s + 1][t]), value, b);
                    c = _mm512_fmadd_ps(_mm512_set1_ps(scores[s + 2][t]), value, c);
                    d = _mm512_fmadd_ps(_mm512_set1_ps(scores[s + 3][t]), value, d);
                }
                sum[s][i] = a, sum[s + 1][i] = b, sum[s + 2][i] = c, sum[s + 3][i] = d;
            }
    }
    for (int64_t s = 0; s < share; s++)
        for (int64_t i = 0; i < vectors; i++)
            store16(j->out + (row * j->heads + first + s) * dim + i * 16,
                    _mm512_div_ps(sum[s][i], _mm512_set1_ps(total[s])));
}

static void attend_tasks(const void *job, int64_t begin, int64_t end) {
    const struct attend *j = job;
    for (int64_t task = begin; task < end; task++) attend_one(j, task / j->kv_heads, task % j->kv_heads);
}

void tandem_attention(const bf16 *q, const bf16 *kv, const int32_t *tables, const int64_t *starts,
                      const int64_t *lengths, bf16 *out, int64_t rows, int64_t stride, int64_t heads, int64_t kv_heads,
                      int64_t block_size, int64_t head_dim, int64_t threads) {
    struct attend job = {q, kv, tables, starts, lengths, out, stride, heads, kv_heads, block_size, head_dim};
    parallel_for(attend_tasks, &job, rows * kv_heads, threads);
}
