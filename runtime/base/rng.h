// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_RNG_H
#define ND_BASE_RNG_H
/*
 * Counter-based random numbers: a pure function of (key, counter), so any rank draws any element
 * without state.
 *
 * Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), Philox4x32 with 10
 * rounds.
 */
#include <stdint.h>

typedef struct nd_rng_block {
    uint32_t w[4];
} nd_rng_block;

/* Philox4x32-10 of a 64-bit key and a 128-bit counter (hi, lo). */
nd_rng_block nd_rng_philox(uint64_t key, uint64_t counter_hi, uint64_t counter_lo);

/* Uniform 64-bit word number `index` of stream `stream`. */
static inline uint64_t nd_rng_u64(uint64_t seed, uint64_t stream, uint64_t index)
{
    const nd_rng_block b = nd_rng_philox(seed, stream, index);
    return (uint64_t)b.w[1] << 32 | b.w[0];
}

/*
 * A draw of mean 0, variance 1, close to normal and cut at 4.9 deviations: the sum of eight 16-bit
 * uniforms of one Philox block, centred and scaled. Integer sums and one float multiplication: the
 * same bits on every machine.
 */
float nd_rng_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* The draw that belongs to a sum of eight uniforms. */
static inline float nd_rng_normal_of(int32_t sum)
{
    /* Each uniform u in {0..65535}: variance (65536^2 - 1) / 12. 8 of them: deviation 65536
     * sqrt(2/3) to 1e-10. */
    const float scale = 1.0f / 53509.92f;
    return (float)(2 * sum - 8 * 65535) * 0.5f * scale;
}

/* perm(i) for i in [0, n): a bijection in O(1) memory (cycle-walking balanced Feistel, 4 rounds of
 * Philox). n >= 1. */
uint64_t nd_rng_permute(uint64_t seed, uint64_t stream, uint64_t n, uint64_t i);

#endif
