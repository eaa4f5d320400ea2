// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/rng.h"

#include "runtime/base/status.h"

nd_rng_block nd_rng_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_lo, c1 = (uint32_t)(counter_lo >> 32);
    uint32_t c2 = (uint32_t)counter_hi, c3 = (uint32_t)(counter_hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (nd_rng_block){{c0, c1, c2, c3}};
}

float nd_rng_normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    nd_rng_block b = nd_rng_philox(seed, stream, index);
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (int32_t)(b.w[i] & 0xffff) + (int32_t)(b.w[i] >> 16);
    }
    return nd_rng_normal_of(sum);
}

static uint64_t feistel(uint64_t seed, uint64_t stream, int half_bits, uint64_t x)
{
    uint64_t mask = ((uint64_t)1 << half_bits) - 1;
    uint64_t left = x >> half_bits, right = x & mask;
    for (uint64_t round = 0; round < 4; round++) {
        uint64_t next = left ^ (nd_rng_u64(seed, stream, right << 2 | round) & mask);
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

uint64_t nd_rng_permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i)
{
    ND_ASSERT(n >= 1 && i < n && n <= (uint64_t)1 << 60);
    int half_bits = 1;
    while (((uint64_t)1 << (2 * half_bits)) < n) {
        half_bits++;
    }
    uint64_t x = i;
    /* The domain is below 4 n, so the walk is short; it ends because the cycle contains i < n. */
    do {
        x = feistel(seed, stream, half_bits, x);
    } while (x >= n);
    return x;
}
