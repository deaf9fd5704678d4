// Copies rows of a KV cache to one contiguous payload and back, and returns its xxh3_64 (the xxhash library's).
//
//   gather    row -> payload, stored through the caches or past them: whichever is faster now (store_policy.py)
//   scatter   payload -> row, stored past the caches: the rows are not read soon, and no line is fetched to be written
//
// Each stripe of 64 bytes is read once, stored and summed, so the sum is of what was stored. The stripe one row further
// is prefetched: rows lie scattered, and the CPU's own prefetching ends with each.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define STRIPE 64
#define BLOCK 16 // stripes, after which the lanes are scrambled
#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX 0x165667919E3779F9ULL

// The secret that xxh3 is specified with.
static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// A stripe in two halves, and likewise the sum's eight lanes.
typedef struct {
    __m256i low, high;
} Pair;

static inline Pair load(const uint8_t *at)
{
    return (Pair){_mm256_loadu_si256((const __m256i *)at), _mm256_loadu_si256((const __m256i *)at + 1)};
}

static inline void store(uint8_t *at, Pair data, int past_caches)
{
    __m256i *to = (__m256i *)at;
    if (past_caches) {
        _mm256_stream_si256(to, data.low);
        _mm256_stream_si256(to + 1, data.high);
    } else {
        _mm256_storeu_si256(to, data.low);
        _mm256_storeu_si256(to + 1, data.high);
    }
}

static inline __m256i mixed_half(__m256i lanes, __m256i data, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2))));
}

static inline Pair mixed(Pair lanes, Pair data, Pair key)
{
    return (Pair){mixed_half(lanes.low, data.low, key.low), mixed_half(lanes.high, data.high, key.high)};
}

static inline __m256i scrambled_half(__m256i lanes, __m256i key)
{
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
    lanes = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

static inline Pair scrambled(Pair lanes)
{
    Pair key = load(secret + sizeof secret - STRIPE);
    return (Pair){scrambled_half(lanes.low, key.low), scrambled_half(lanes.high, key.high)};
}

// A sum in progress: `left` stripes are still to come; `next` is how many of this block have come.
typedef struct {
    Pair lanes;
    int64_t left;
    int next;
} Sum;

static inline Sum begin_sum(int64_t stripes)
{
    return (Sum){{_mm256_set_epi64x(PRIME64_3, PRIME64_2, PRIME64_1, PRIME32_3),
                  _mm256_set_epi64x(PRIME32_1, PRIME64_5, PRIME32_2, PRIME64_4)}, stripes, 0};
}

// The payload's very last stripe has a place of its own in the secret, and nothing is scrambled after it.
static inline void add(Sum *sum, Pair data)
{
    int last = --sum->left == 0;
    sum->lanes = mixed(sum->lanes, data, load(last ? secret + sizeof secret - STRIPE - 7 : secret + sum->next * 8));
    if (++sum->next == BLOCK && !last) {
        sum->lanes = scrambled(sum->lanes);
        sum->next = 0;
    }
}

static inline uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t end_sum(const Sum *sum, uint64_t length)
{
    uint64_t lanes[8], keys[8], value = length * PRIME64_1;
    memcpy(lanes, &sum->lanes, sizeof lanes);
    memcpy(keys, secret + 11, sizeof keys);
    for (int pair = 0; pair < 8; pair += 2)
        value += folded(lanes[pair] ^ keys[pair], lanes[pair + 1] ^ keys[pair + 1]);
    value = (value ^ (value >> 37)) * PRIME_MX;
    return value ^ (value >> 32);
}

static inline Pair moved(const uint8_t *from, const uint8_t *ahead, uint8_t *to, int past_caches)
{
    Pair data = load(from);
    _mm_prefetch((const char *)ahead, _MM_HINT_T1); // more of these go at once than to the first cache
    store(to, data, past_caches);
    return data;
}

static inline void copy_row(const uint8_t *from, const uint8_t *ahead, uint8_t *to, int64_t bytes, int past_caches,
                            Sum *sum)
{
    int64_t at = 0;
    while (at < bytes) {
        if (sum->next || bytes - at < BLOCK * STRIPE || sum->left <= BLOCK) {
            add(sum, moved(from + at, ahead + at, to + at, past_caches));
            at += STRIPE;
            continue;
        }
        Pair lanes = sum->lanes; // a whole block, not the last: nothing to decide
        for (int stripe = 0; stripe < BLOCK; stripe++, at += STRIPE)
            lanes = mixed(lanes, moved(from + at, ahead + at, to + at, past_caches), load(secret + stripe * 8));
        sum->lanes = scrambled(lanes);
        sum->left -= BLOCK;
    }
}

// Both copy `count` rows of `row_bytes`, a multiple of 64 and more than 240 in all, and return the payload's sum. What
// is stored past the caches lies at a multiple of 64.

uint64_t tandem_gather(const uint8_t *rows, int64_t row_bytes, const int64_t *ids, int64_t count, uint8_t *payload,
                       int past_caches)
{
    Sum sum = begin_sum(count * row_bytes / STRIPE);
    for (int64_t i = 0; i < count; i++, payload += row_bytes) {
        const uint8_t *row = rows + ids[i] * row_bytes, *ahead = rows + ids[i + 1 < count ? i + 1 : i] * row_bytes;
        if (past_caches)
            copy_row(row, ahead, payload, row_bytes, 1, &sum);
        else
            copy_row(row, ahead, payload, row_bytes, 0, &sum);
    }
    _mm_sfence();
    return end_sum(&sum, count * row_bytes);
}

uint64_t tandem_scatter(const uint8_t *payload, uint8_t *rows, int64_t row_bytes, const int64_t *ids, int64_t count)
{
    Sum sum = begin_sum(count * row_bytes / STRIPE);
    for (int64_t i = 0; i < count; i++, payload += row_bytes)
        copy_row(payload, payload + row_bytes, rows + ids[i] * row_bytes, row_bytes, 1, &sum);
    _mm_sfence();
    return end_sum(&sum, count * row_bytes);
}
