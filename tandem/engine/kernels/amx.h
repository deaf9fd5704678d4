/* Tiles with AMX, up to 32 rows: 16 rows of x times 16 outputs, 32 inputs at a time, where the CPU has it and Linux
   permits it. Then no tile is computed with AVX512, so that a row's result does not depend on how many rows there are.
   Rare numbers are put in their places as a panel is opened. */

#pragma once
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

static int64_t has_amx; /* true if this process may use AMX */

enum { AMX_PAIRS = 16 }; /* the steps that an AMX instruction multiplies together */

#ifdef __AMX_BF16__

enum { RING = 4 }; /* opened blocks of AMX_PAIRS steps, so that opening one does not wait for the last one's tiles */

static void ask_for_amx(void) {
    enum { ASK_FOR_STATE = 0x1023, TILES = 18 }; /* arguments of arch_prctl */
    has_amx = !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILES);
}

/* gcc does not know how much memory its loads of tiles and of their shapes read: hence the empty statements before. */

/* Sets the tile registers' shapes, in each thread before its first tile of a pass: other code may have set others. */
static void take_tiles(void) {
    struct { uint8_t palette, first, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    __asm__ volatile("" ::"r"(&shape) : "memory");
    if (has_amx) _tile_loadconfig(&shape);
}

static void leave_tiles(void) {
    if (has_amx) _tile_release();
}

/* `two`: of 32 rows, else of 16. There may be fewer: what lies behind them is read too, and its results are not used.
   The last pairs may be fewer than AMX_PAIRS: then some of x before them is read again, times zeros. */
static inline __attribute__((always_inline)) void amx_tile(const int32_t *x, int64_t stride, int64_t pairs, float *sums,
                                                           const struct panel_at *at, const int two, const int packed) {
    _Alignas(64) uint32_t ring[RING * AMX_PAIRS * 32];
    const struct panel_at p = *at;
    const char *ahead = p.ahead;
    const struct rare *rare = p.rare;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t end = AMX_PAIRS; end < pairs + AMX_PAIRS; end += AMX_PAIRS) {
        const int64_t begin = end - AMX_PAIRS, k = end < pairs ? begin : pairs - AMX_PAIRS;
        const uint32_t *open = p.open + begin * 32;
        if (packed) {
            uint32_t *to = p.opened ? p.opened + begin * 32 : ring + begin % (RING * AMX_PAIRS) * 32;
            if (k < begin) memset(to, 0, (begin - k) * 128);
            _Pragma("GCC unroll 4") for (int64_t i = begin - k; i < AMX_PAIRS; i++) {
                const struct step_open step = open_step(p.packed + (k + i) * STEP_BYTES, p.codes);
                _mm512_store_si512(to + i * 32, step.low), _mm512_store_si512(to + i * 32 + 16, step.high);
                if (p.lines > 0) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64;
                if (p.lines > 1) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 32;
            }
            for (; rare < p.rare_end && rare->at < (k + AMX_PAIRS) * 64; rare++) {
                const int64_t pair = (rare->at - k * 64) / 64;
                ((bf16 *)to)[pair * 64 + rare->at % 32 * 2 + rare->at / 32 % 2] = narrow(rare->value);
            }
            open = to;
        } else
            for (int64_t i = begin; i < end && i < p.lines; i++) _mm_prefetch(ahead, _MM_HINT_T1), ahead += 64;
        __asm__ volatile("" ::"r"(open) : "memory");
        _tile_loadd(6, open, 128);
        _tile_loadd(7, open + 16, 128);
        _tile_loadd(4, x + k, stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 16 * stride + k, stride * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if (two) {
        _tile_stored(2, sums + 16 * 32, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
    }
}

static void amx_tiles(const int32_t *x, int64_t rows, int64_t stride, int64_t pairs, float *sums,
                      const struct panel_at *at) {
    if (at->packed) {
        if (rows > 16) amx_tile(x, stride, pairs, sums, at, 1, 1);
        else amx_tile(x, stride, pairs, sums, at, 0, 1);
    } else {
        if (rows > 16) amx_tile(x, stride, pairs, sums, at, 1, 0);
        else amx_tile(x, stride, pairs, sums, at, 0, 0);
    }
}

#else

static void ask_for_amx(void) {}
static void take_tiles(void) {}
static void leave_tiles(void) {}
#endif

enum { MOST_ROWS = 32 };

static inline int64_t num_tiles(int64_t rows) {
    const int64_t most = has_amx ? MOST_ROWS : TILE_ROWS;
    return (rows + most - 1) / most;
}

/* Where the tile begins: with AMX all but the last are full, with AVX512 all have about as many rows. */
static inline int64_t tile_begin(int64_t rows, int64_t tile, int64_t tiles) {
    if (!has_amx) return rows * tile / tiles;
    return tile < tiles ? tile * MOST_ROWS : rows;
}

/* Multiplies one tile, at most of the size that num_tiles assumes. */
static void multiply(const int32_t *x, int64_t rows, int64_t stride, int64_t pairs, float *sums,
                     const struct panel_at *at) {
#ifdef __AMX_BF16__
    if (has_amx) {
        amx_tiles(x, rows, stride, pairs, sums, at);
        return;
    }
#endif
    (at->packed ? open_tiles : read_tiles)[rows](x, stride, pairs, sums, at);
}
