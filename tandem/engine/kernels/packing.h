/* A weight (outputs, inputs) of bfloat16 in 12 bits a number, without loss.

   It lies in panels of 32 outputs, one after the other. The numbers of a panel have few exponents, so a code of 4 bits
   tells which: 0 is the number zero, c is the panel's base + c. A step of a panel, two inputs of its 32 outputs, is 64
   bytes of sign and mantissa and 32 bytes of codes, those of the last 16 outputs in the upper halves. The rare numbers
   with another exponent are zero there, and listed in the order of `at`.

   Or, where `bits` are 8 or 4, quantized, a number being code * scale + offset: then a panel has, for each `group` of
   inputs, 32 scales and 32 offsets, of whichever type holds them exactly, and a step is its codes: of 8 bits in the
   order (output, input), of 4 bits those of the last 16 outputs in the upper halves. */

#pragma once
#include <stdlib.h>
#include <string.h>

#include "numbers.h"

enum { STEP_BYTES = 96, CODES = 16 };
enum { IN_BFLOAT16, IN_FLOAT16, IN_FLOAT32 }; /* scales and offsets */

/* structs.py has the same structs. */
struct rare { uint32_t at; float value; };  /* at: input * 32 + the output's place in the panel */
struct panel { int32_t base, first_rare; }; /* one more of them than there are panels */
struct weight {
    uint8_t *bytes;
    struct panel *panels;
    struct rare *rare;
    int64_t outputs, inputs, bits, group, scale_type;
    const int32_t *order; /* which input each of its columns is of, or null */
};

union number { uint32_t bits; float value; };

static inline float wide(bf16 x) { return (union number){(uint32_t)x << 16}.value; }
static inline bf16 nearest(float x) {
    const uint32_t bits = (union number){.value = x}.bits;
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline bf16 narrow(float x) { return (bf16)((union number){.value = x}.bits >> 16); } /* of what a bf16 was */

/* Where `halves` is set the outputs are (gate | up), and each panel is 16 of gate and the same 16 of up. */
static inline const bf16 *output_row(const bf16 *from, int64_t panel, int64_t n, int64_t outputs, int64_t inputs,
                                     int64_t halves) {
    return from + (halves ? panel * 16 + n % 16 + n / 16 * (outputs / 2) : panel * 32 + n) * inputs;
}

static inline int code_of(bf16 x, int32_t base) {
    int code = (x >> 7 & 0xff) - base;
    return code > 0 && code < CODES ? code : 0;
}

/* Finds the base of each panel that leaves the fewest rare numbers; returns how many those are in all. */
int64_t tandem_survey(const bf16 *from, int64_t outputs, int64_t inputs, int64_t halves, struct panel *panels) {
    int64_t rare = 0;
    for (int64_t panel = 0; panel < outputs / 32; panel++) {
        int64_t counts[256] = {0}, zeros = 0, covered = 0, most = -1;
        for (int64_t n = 0; n < 32; n++) {
            const bf16 *row = output_row(from, panel, n, outputs, inputs, halves);
            for (int64_t k = 0; k < inputs; k++) counts[row[k] >> 7 & 0xff]++, zeros += (row[k] & 0x7fff) == 0;
        }
        for (int base = 0; base + CODES <= 256; base++) {
            covered = 0;
            for (int code = 1; code < CODES; code++) covered += counts[base + code];
            if (covered > most) most = covered, panels[panel].base = base;
        }
        panels[panel].first_rare = (int32_t)rare;
        rare += 32 * inputs - zeros - most;
    }
    panels[outputs / 32].first_rare = (int32_t)rare;
    return rare;
}

static int by_place(const void *a, const void *b) {
    const uint32_t x = ((const struct rare *)a)->at, y = ((const struct rare *)b)->at;
    return (x > y) - (x < y);
}

void tandem_pack(const bf16 *from, int64_t halves, const struct weight *to) {
    const int64_t outputs = to->outputs, inputs = to->inputs;
    uint8_t *bytes = to->bytes;
    struct rare *rare = to->rare;
    for (int64_t panel = 0; panel < outputs / 32; panel++, bytes += inputs / 2 * STEP_BYTES) {
        struct rare *const first = rare;
        memset(bytes, 0, inputs / 2 * STEP_BYTES);
        for (int64_t n = 0; n < 32; n++) {
            const bf16 *row = output_row(from, panel, n, outputs, inputs, halves);
            for (int64_t k = 0; k < inputs; k++) {
                const int code = code_of(row[k], to->panels[panel].base);
                if (!code && row[k] & 0x7fff) {
                    *rare++ = (struct rare){(uint32_t)(k * 32 + n), wide(row[k])};
                    continue;
                }
                uint8_t *step = bytes + k / 2 * STEP_BYTES;
                step[n * 2 + k % 2] = (uint8_t)(row[k] >> 8 & 0x80) | (row[k] & 0x7f);
                step[64 + n % 16 * 2 + k % 2] |= (uint8_t)(code << n / 16 * 4);
            }
        }
        if (rare > first) qsort(first, rare - first, sizeof *first, by_place);
    }
}

static inline int64_t scale_bytes(const struct weight *w) { return 2 * 32 * (w->scale_type == IN_FLOAT32 ? 4 : 2); }
static inline int64_t group_bytes(const struct weight *w) { return scale_bytes(w) + w->group / 2 * w->bits * 8; }

/* 16 of a group's 32 scales, which its 32 offsets follow, from `at` on. */
static inline __m512 scales16(const uint8_t *group, int64_t type, int64_t at) {
    if (type == IN_FLOAT32) return _mm512_loadu_ps((const float *)group + at);
    if (type == IN_BFLOAT16) return load16((const bf16 *)group + at);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)((const uint16_t *)group + at)));
}

static inline int64_t panel_bytes(const struct weight *w) {
    return w->bits ? w->inputs / w->group * group_bytes(w) : w->inputs / 2 * STEP_BYTES;
}

static inline int is_row(const struct weight *w, int64_t id) { return id >= 0 && id < w->outputs; }

static void dequantize_rows(const struct weight *from, const int64_t *ids, int64_t count, bf16 *out) {
    for (; count--; ids++, out += from->inputs) {
        if (!is_row(from, *ids)) continue;
        const int64_t n = *ids % 32;
        const uint8_t *group = from->bytes + *ids / 32 * panel_bytes(from);
        for (int64_t k = 0; k < from->inputs; k += from->group, group += group_bytes(from)) {
            float scales[16], offsets[16];
            _mm512_storeu_ps(scales, scales16(group, from->scale_type, n / 16 * 16));
            _mm512_storeu_ps(offsets, scales16(group, from->scale_type, 32 + n / 16 * 16));
            const float scale = scales[n % 16], offset = offsets[n % 16];
            const uint8_t *step = group + scale_bytes(from);
            for (int64_t i = 0; i < from->group; i++, step += i % 2 ? 0 : from->bits * 8) {
                const int code = from->bits == 8 ? (int8_t)step[n * 2 + i % 2] + 128 : step[n % 16 * 2 + i % 2] >> n / 16 * 4 & 0xf;
                out[k + i] = nearest((float)code * scale + offset);
            }
        }
    }
}

/* Rows `ids` of a packed weight, as they were; of a quantized one, as it has them. Ids of no row are passed over. */
void tandem_unpack_rows(const struct weight *from, const int64_t *ids, int64_t count, bf16 *out) {
    if (from->bits) {
        dequantize_rows(from, ids, count, out);
        return;
    }
    const int64_t inputs = from->inputs;
    for (; count--; ids++, out += inputs) {
        if (!is_row(from, *ids)) continue;
        const int64_t panel = *ids / 32, n = *ids % 32;
        const struct panel *p = from->panels + panel;
        const uint8_t *step = from->bytes + panel * (inputs / 2) * STEP_BYTES;
        for (int64_t k = 0; k < inputs; k++) {
            const int sign = step[n * 2 + k % 2], code = step[64 + n % 16 * 2 + k % 2] >> n / 16 * 4 & 0xf;
            out[k] = (bf16)((sign & 0x80) << 8 | (code ? code + p->base : 0) << 7 | (sign & 0x7f));
            step += k % 2 * STEP_BYTES;
        }
        for (const struct rare *r = from->rare + p->first_rare; r < from->rare + p[1].first_rare; r++)
            if (r->at % 32 == n) out[r->at / 32] = narrow(r->value);
    }
}

