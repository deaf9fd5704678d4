/* Rows of the KV cache, each a head's keys or values of one token: bfloat16 as they are; or int8 codes, and behind them
   the bfloat16 that they are multiples of. kv_cache.py says why a row has its own, and makes the same bytes. */

#pragma once
#include <string.h>

#include "model.h"

static inline int64_t kv_row(const struct model *m) { /* in bytes */
    return m->kv_int8 ? m->head_dim + (int64_t)sizeof(bf16) : m->head_dim * (int64_t)sizeof(bf16);
}

static void code_row(const bf16 *x, int64_t dim, char *to) {
    __m512 most = _mm512_set1_ps(1e-20f);
    for (int64_t i = 0; i < dim; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(load16(x + i)));
    const __m256i scales = (__m256i)_mm512_cvtneps_pbh(_mm512_set1_ps(_mm512_reduce_max_ps(most) / 127));
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(scales), 16));
    for (int64_t i = 0; i < dim; i += 16)
        _mm_storeu_si128((void *)(to + i),
                         _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(load16(x + i), scale))));
    const bf16 one = (bf16)_mm256_extract_epi16(scales, 0);
    memcpy(to + dim, &one, sizeof one);
}

static void open_row(const char *from, int64_t dim, bf16 *to) {
    bf16 one;
    memcpy(&one, from + dim, sizeof one);
    const __m512 scale = _mm512_castsi512_ps(_mm512_set1_epi32(one << 16));
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + i)));
        store16(to + i, _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale));
    }
}

static inline void write_row(const struct model *m, const bf16 *x, char *to) {
    if (m->kv_int8) code_row(x, m->head_dim, to);
    else memcpy(to, x, m->head_dim * sizeof *x);
}

static inline void read_rows(const struct model *m, const char *from, int64_t rows, bf16 *to) {
    if (!m->kv_int8) memcpy(to, from, rows * kv_row(m));
    else
        for (int64_t row = 0; row < rows; row++) open_row(from + row * kv_row(m), m->head_dim, to + row * m->head_dim);
}
