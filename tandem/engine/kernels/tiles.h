/* Tiles: sums (rows, 32) = rows of x, `stride` pairs apart, times one panel of `pairs` steps; here with AVX512, up to
   12 rows.

   READ: an open panel, 32 pairs a step. OPEN: one that is `packed`, with the exponents of `codes`; it is left open in
   `opened` if that is given. Meanwhile cache lines from `ahead` on are prefetched: READ: `lines` of them, one a step;
   OPEN: `lines` of them a step. The `rare` numbers of a packed panel are not added here. */

#pragma once
#include "packing.h"

struct panel_at {
    const uint32_t *open;
    const uint8_t *packed;
    __m512i codes;
    uint32_t *opened;
    const char *ahead;
    int64_t lines;
    const struct rare *rare, *rare_end;
};

static inline __m512i open16(const uint8_t *signs, __m512i exponents) {
    __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)signs));
    return _mm512_ternarylogic_epi32(words, _mm512_set1_epi16((short)0x807f), exponents, 0xea); /* a & b | c */
}

struct step_open { __m512i low, high; }; /* of outputs 0 … 15 and 16 … 31 */

static inline struct step_open open_step(const uint8_t *packed, __m512i table) {
    const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(packed + 64)));
    return (struct step_open){open16(packed, _mm512_permutexvar_epi16(codes, table)),
                              open16(packed + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table))};
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
                const struct step_open step = open_step(packed, table); \
                w0 = step.low, w1 = step.high; \
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
