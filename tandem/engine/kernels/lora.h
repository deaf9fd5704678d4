/* What LoRA adapters add to a linear layer's sums: x down^T up, for the rows that have an adapter, in float32.

   It is computed before the layer, into `added`, which finish16 and finish_silu read. A row's sums do not depend on the
   rows beside it. */

#pragma once
#include "model.h"
#include "threads.h"

enum { MOST_RANK = 256, ROWS_AT_ONCE = 4, AHEAD = 1024 }; /* AHEAD: inputs, that are fetched */

/* Places of a layer's parts in an adapter's table. */
enum { QKV_PARTS = 0, O_PARTS = 3, GATE_UP_PARTS = 4, DOWN_PARTS = 6, PARTS = 7 };

/* The sums of `rows` rows of x with `ranks` rows of `down`, both few and known; each is summed from the first input to the
   last, whatever is summed beside it. */
static inline __attribute__((always_inline)) void dots(const bf16 *down, const int ranks, const bf16 *x, const int rows,
                                                       int64_t inputs, float *shrunk) {
    __m512 sum[ROWS_AT_ONCE];
    _Pragma("GCC unroll 4") for (int n = 0; n < ranks * rows; n++) sum[n] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 32) {
        const __mmask32 here = inputs - i < 32 ? ((__mmask32)1 << (inputs - i)) - 1 : (__mmask32)-1;
        _Pragma("GCC unroll 4") for (int r = 0; r < ranks; r++) {
            const bf16 *at = down + r * inputs + i;
            const __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(here, at);
            _mm_prefetch(at + AHEAD, _MM_HINT_T0);
            _Pragma("GCC unroll 4") for (int n = 0; n < rows; n++)
                sum[r * rows + n] = _mm512_dpbf16_ps(
                    sum[r * rows + n], a, (__m512bh)_mm512_maskz_loadu_epi16(here, x + n * inputs + i));
        }
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < ranks * rows; n++)
        shrunk[n % rows * MOST_RANK + n / rows] = _mm512_reduce_add_ps(sum[n]);
}

/* shrunk (rows, MOST_RANK) = x (rows, inputs) down^T */
static inline __attribute__((always_inline)) void shrink(const struct lora_part *part, const bf16 *x, const int rows,
                                                         int64_t inputs, float *shrunk) {
    const int together = ROWS_AT_ONCE / rows;
    int64_t r = 0;
    for (; r + together <= part->rank; r += together) dots(part->down + r * inputs, together, x, rows, inputs, shrunk + r);
    for (; r < part->rank; r++) dots(part->down + r * inputs, 1, x, rows, inputs, shrunk + r);
}

/* added (rows, stride) = shrunk (rows, MOST_RANK) up, in `width` vectors of columns from `column` on. */
static inline __attribute__((always_inline)) void expand_columns(const struct lora_part *part, const float *shrunk,
                                                                 const int rows, const int width, int64_t column,
                                                                 int64_t stride, float *added) {
    __m512 sums[ROWS_AT_ONCE];
    _Pragma("GCC unroll 4") for (int n = 0; n < rows * width; n++) sums[n] = _mm512_setzero_ps();
    for (int64_t r = 0; r < part->rank; r++) {
        const bf16 *at = part->up + r * part->outputs + column;
        _Pragma("GCC unroll 4") for (int i = 0; i < width; i++) {
            const __m512 up = load16(at + 16 * i);
            if (i % 2 == 0) _mm_prefetch(at + 16 * i + 16 * ROWS_AT_ONCE * 4, _MM_HINT_T0);
            _Pragma("GCC unroll 4") for (int n = 0; n < rows; n++)
                sums[n * width + i] = _mm512_fmadd_ps(_mm512_set1_ps(shrunk[n * MOST_RANK + r]), up, sums[n * width + i]);
        }
    }
    _Pragma("GCC unroll 4") for (int n = 0; n < rows * width; n++)
        _mm512_storeu_ps(added + n / width * stride + column + n % width * 16, sums[n]);
}

/* Of `rows` rows, ROWS_AT_ONCE at most, of one adapter; zeros where the part's rank is 0. */
static inline __attribute__((always_inline)) void adapt_rows(const struct lora_part *part, int64_t parts, const bf16 *x,
                                                             const int rows, int64_t inputs, int64_t outputs,
                                                             float *added) {
    const int width = ROWS_AT_ONCE / rows;
    float shrunk[ROWS_AT_ONCE * MOST_RANK];
    for (; parts--; added += part->outputs, part++) {
        int64_t column = 0;
        shrink(part, x, rows, inputs, shrunk);
        for (; column + 16 * width <= part->outputs; column += 16 * width)
            expand_columns(part, shrunk, rows, width, column, outputs, added);
        for (; column < part->outputs; column += 16) expand_columns(part, shrunk, rows, 1, column, outputs, added);
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
            if (!adapter) continue;
            const struct lora_part *part = adapter + layer * PARTS + first;
            const bf16 *from = x + row * w->inputs;
            float *to = (float *)thread->result + (row - piece * each) * w->outputs;
            switch (count) {
            case 1: adapt_rows(part, parts, from, 1, w->inputs, w->outputs, to); break;
            case 2: adapt_rows(part, parts, from, 2, w->inputs, w->outputs, to); break;
            case 3: adapt_rows(part, parts, from, 3, w->inputs, w->outputs, to); break;
            default: adapt_rows(part, parts, from, ROWS_AT_ONCE, w->inputs, w->outputs, to);
            }
        }
        if (!win(thread, piece)) continue;
        for (int64_t row = piece * each; row < end; row++)
            if (s->adapters[row])
                memcpy(s->added + row * w->outputs, (float *)thread->result + (row - piece * each) * w->outputs,
                       w->outputs * sizeof(float));
        written(thread);
    }
}
