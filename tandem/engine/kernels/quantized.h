/* x weight^T of quantized weights, a panel at a time; a number is code * scale + offset, by groups of inputs.

   AVX512    codes, less half their range, are bfloat16 exactly: they are multiplied as they are, and each group's sums
             are scaled at its end:  sum += scale * (x codes) + (offset + half * scale) * (sum of x's group)
   AMX       a panel is opened, scaled, and multiplied whole

   Where there are more rows than one tile, the first leaves the codes open for the others. */

#pragma once
#include "amx.h"
#include "threads.h"

enum { READ_OPEN = 0 }; /* codes that are open already, in place of bits */

struct quantized_at {
    const uint8_t *groups;
    const uint32_t *open;
    uint32_t *opened; /* if given, codes are left there */
    const char *ahead; /* fetched meanwhile: `lines` of 64 bytes, and where packed as many bytes as are read */
    int64_t lines, count, pairs, bytes, scale_type, scale_bytes, half, num_groups; /* groups, pairs and bytes of each */
    const float *x_sums; /* of each row's groups */
};

struct codes_open { __m512i low, high; }; /* of outputs 0 ... 15 and 16 ... 31, of two inputs */

static inline __m512i from_bytes(const uint8_t *codes) {
    const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)codes)));
    const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(codes + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

static inline struct codes_open open_codes(const uint8_t *codes, int bits, __m512i table) {
    if (bits == 8) return (struct codes_open){from_bytes(codes), from_bytes(codes + 32)};
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes));
    return (struct codes_open){_mm512_permutexvar_epi16(words, table),
                               _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table)};
}

/* bfloat16 of -8 ... 7, twice: a lookup takes 5 bits, a code and the lowest bit of its neighbour. */
static inline __m512i numbers_of_nibbles(void) {
    static const bf16 numbers[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                     0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)numbers));
}

struct reading { /* where a tile is */
    const int32_t *x;
    const uint32_t *open;
    uint32_t *opened;
    const char *ahead;
    int64_t line;
};

/* Adds `together` groups from g on, whose sums of codes do not wait for each other, one after the other. */
static inline __attribute__((always_inline)) void add_groups(const int rows, const int bits, const int together,
                                                             int64_t stride, float *sums, int64_t g,
                                                             const struct quantized_at *at, struct reading *r) {
    const __m512i table = numbers_of_nibbles();
    const uint8_t *group = at->groups + g * at->bytes;
    __m512 part[2][TILE_ROWS][2];
    _Pragma("GCC unroll 2") for (int i = 0; i < together; i++)
        _Pragma("GCC unroll 12") for (int m = 0; m < rows; m++) part[i][m][0] = part[i][m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < at->pairs; k++, r->x++) {
        _Pragma("GCC unroll 2") for (int i = 0; i < together; i++) {
            struct codes_open w;
            if (bits == READ_OPEN) {
                w = (struct codes_open){_mm512_loadu_si512(r->open), _mm512_loadu_si512(r->open + 16)}, r->open += 32;
                if (r->line++ < at->lines) _mm_prefetch(r->ahead, _MM_HINT_T1), r->ahead += 64;
            } else {
                w = open_codes(group + i * at->bytes + at->scale_bytes + k * bits * 8, bits, table);
                if (r->opened)
                    _mm512_store_si512(r->opened, w.low), _mm512_store_si512(r->opened + 16, w.high), r->opened += 32;
                if (r->ahead) _mm_prefetch(r->ahead, _MM_HINT_T1), r->ahead += bits * 8;
            }
            _Pragma("GCC unroll 12") for (int m = 0; m < rows; m++) {
                const __m512bh a = (__m512bh)_mm512_set1_epi32(r->x[m * stride + i * at->pairs]);
                part[i][m][0] = _mm512_dpbf16_ps(part[i][m][0], a, (__m512bh)w.low);
                part[i][m][1] = _mm512_dpbf16_ps(part[i][m][1], a, (__m512bh)w.high);
            }
        }
    }
    r->x += (together - 1) * at->pairs;
    const __m512 half = _mm512_set1_ps((float)at->half);
    _Pragma("GCC unroll 2") for (int i = 0; i < together; i++) {
        const uint8_t *head = group + i * at->bytes;
        const int64_t type = at->scale_type;
        const __m512 scales[2] = {scales16(head, type, 0), scales16(head, type, 16)};
        const __m512 offsets[2] = {_mm512_fmadd_ps(half, scales[0], scales16(head, type, 32)),
                                   _mm512_fmadd_ps(half, scales[1], scales16(head, type, 48))};
        _Pragma("GCC unroll 12") for (int m = 0; m < rows; m++) {
            const __m512 x_sum = _mm512_set1_ps(at->x_sums[m * at->num_groups + g + i]);
            _Pragma("GCC unroll 2") for (int n = 0; n < 2; n++) {
                float *to = sums + m * 32 + n * 16;
                const __m512 sum = _mm512_fmadd_ps(scales[n], part[i][m][n], _mm512_load_ps(to));
                _mm512_store_ps(to, _mm512_fmadd_ps(offsets[n], x_sum, sum));
            }
        }
    }
}

/* sums (rows, 32) of `rows` rows of x, `stride` pairs apart. */
static inline __attribute__((always_inline)) void quantized_tile(const int rows, const int bits, const int32_t *x,
                                                                 int64_t stride, float *sums,
                                                                 const struct quantized_at *at) {
    struct reading reading = {x, at->open, at->opened, at->ahead, 0};
    int64_t g = 0;
    for (int i = 0; i < rows * 32; i += 16) _mm512_store_ps(sums + i, _mm512_setzero_ps());
    if (bits == 4 && rows <= 4 && !at->opened)
        for (; g + 2 <= at->count; g += 2) add_groups(rows, bits, 2, stride, sums, g, at, &reading);
    for (; g < at->count; g++) add_groups(rows, bits, 1, stride, sums, g, at, &reading);
}

typedef void (*quantized_fn)(const int32_t *, int64_t, float *, const struct quantized_at *);
#define QUANTIZED(ROWS, BITS) \
    static void quantized##BITS##_##ROWS(const int32_t *x, int64_t stride, float *sums, const struct quantized_at *at) { \
        quantized_tile(ROWS, BITS, x, stride, sums, at); \
    }
#define QUANTIZED_TILES(BITS) \
    QUANTIZED(1, BITS) QUANTIZED(2, BITS) QUANTIZED(3, BITS) QUANTIZED(4, BITS) QUANTIZED(5, BITS) QUANTIZED(6, BITS) \
    QUANTIZED(7, BITS) QUANTIZED(8, BITS) QUANTIZED(9, BITS) QUANTIZED(10, BITS) QUANTIZED(11, BITS) QUANTIZED(12, BITS) \
    static const quantized_fn quantized##BITS[] = { \
        0, quantized##BITS##_1, quantized##BITS##_2, quantized##BITS##_3, quantized##BITS##_4, quantized##BITS##_5, \
        quantized##BITS##_6, quantized##BITS##_7, quantized##BITS##_8, quantized##BITS##_9, quantized##BITS##_10, \
        quantized##BITS##_11, quantized##BITS##_12};
QUANTIZED_TILES(0)
QUANTIZED_TILES(4)
QUANTIZED_TILES(8)

/* Sums each row's groups of `size` inputs. */
static void sum_groups(struct thread *thread, const bf16 *x, int64_t rows, int64_t inputs, int64_t size) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    const int64_t count = inputs / size;
    begin(thread, rows);
    float *sums = thread->result;
    for (int64_t next, row; (row = take(thread, &next)) >= 0;) {
        for (int64_t g = 0; g < count; g++) {
            const bf16 *from = x + row * inputs + g * size;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = 0; i < size; i += 32) {
                const __mmask32 some = size - i < 32 ? ((__mmask32)1 << (size - i)) - 1 : ~(__mmask32)0;
                sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(some, from + i), ones);
            }
            sums[g] = _mm512_reduce_add_ps(sum);
        }
        if (win(thread, row)) memcpy(thread->x_sums + row * count, sums, count * sizeof *sums), written(thread);
    }
}
