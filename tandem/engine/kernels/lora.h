/* What LoRA adapters add to a linear layer's sums: x down^T up, for the rows that have an adapter, in float32.

   It is computed before the layer, into `added`, which finish16 and finish_silu read. A row's sums do not depend on the
   rows beside it. */

#pragma once
#include "model.h"
#include "threads.h"

enum { MOST_RANK = 256, ROWS_AT_ONCE = 4 };

/* Places of a layer's parts in an adapter's table. */
enum { QKV_PARTS = 0, O_PARTS = 3, GATE_UP_PARTS = 4, DOWN_PARTS = 6, PARTS = 7 };

static inline float dot(const bf16 *a, const bf16 *b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 32 <= size; i += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + i), (__m512bh)_mm512_loadu_si512(b + i));
    if (i < size) {
        const __mmask32 rest = ((__mmask32)1 << (size - i)) - 1;
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(rest, a + i),
                               (__m512bh)_mm512_maskz_loadu_epi16(rest, b + i));
    }
    return _mm512_reduce_add_ps(sum);
}

/* added (rows, stride) = shrunk (rows, MOST_RANK) up, in columns 0 ... outputs; zeros where the part's rank is 0. */
static void expand(const struct lora_part *part, const float *shrunk, int64_t rows, int64_t stride, float *added) {
    for (int64_t column = 0; column < part->outputs; column += 16) {
        __m512 sums[ROWS_AT_ONCE] = {0};
        for (int64_t r = 0; r < part->rank; r++) {
            const __m512 up = load16(part->up + r * part->outputs + column);
            for (int64_t row = 0; row < rows; row++)
                sums[row] = _mm512_fmadd_ps(_mm512_set1_ps(shrunk[row * MOST_RANK + r]), up, sums[row]);
        }
        for (int64_t row = 0; row < rows; row++) _mm512_storeu_ps(added + row * stride + column, sums[row]);
    }
}

/* Of rows, ROWS_AT_ONCE at most, of one adapter. */
static void adapt_rows(const struct lora_part *part, int64_t parts, const bf16 *x, int64_t rows, int64_t inputs,
                       int64_t outputs, float *added) {
    float shrunk[ROWS_AT_ONCE * MOST_RANK];
    for (; parts--; added += part->outputs, part++) {
        for (int64_t r = 0; r < part->rank; r++)
            for (int64_t row = 0; row < rows; row++)
                shrunk[row * MOST_RANK + r] = dot(part->down + r * inputs, x + row * inputs, inputs);
        expand(part, shrunk, rows, outputs, added);
    }
}

/* What the `parts` from place `first` of the adapters' tables add to the outputs of layer `layer`'s weight `w`. */
static void adapt(struct thread *thread, const struct step *s, int64_t layer, const bf16 *x, const struct weight *w,
                  int64_t first, int64_t parts) {
    if (!s->adapters) return;
    const int64_t rows = s->rows, each = rows < ROWS_AT_ONCE * thread->threads ? 1 : ROWS_AT_ONCE;
    begin(thread, (rows + each - 1) / each);
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        const int64_t end = (piece + 1) * each < rows ? (piece + 1) * each : rows;
        for (int64_t row = piece * each, count; row < end; row += count) {
            const struct lora_part *adapter = s->adapters[row];
            for (count = 1; row + count < end && s->adapters[row + count] == adapter;) count++;
            if (adapter)
                adapt_rows(adapter + layer * PARTS + first, parts, x + row * w->inputs, count, w->inputs, w->outputs,
                           s->added + row * w->outputs);
        }
    }
}
