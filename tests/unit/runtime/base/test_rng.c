// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>

#include "runtime/base/rng.h"

/* Known answers of Random123's kat_vectors for philox4x32 10. */
Test(rng, philox_known_answers)
{
    static const struct {
        uint64_t in[3];
        uint32_t out[4];
    } cases[] = {
        {{0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0ull, ~0ull, ~0ull}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        const uint64_t *in = cases[i].in;
        cr_expect_arr_eq(nd_rng_philox(in[0], in[1], in[2]).w, cases[i].out, 16, "case %d", i);
    }
}

Test(rng, normal_has_mean_zero_and_variance_one)
{
    enum { N = 200000 };
    double sum = 0, square = 0;
    for (int i = 0; i < N; i++) {
        double x = nd_rng_normal(7, 3, (uint64_t)i);
        sum += x;
        square += x * x;
    }
    /* Standard errors: 1/sqrt(N) of the mean, sqrt(2/N) of the variance; five of them. */
    cr_assert_float_eq(sum / N, 0, 5 * 0.00224);
    cr_assert_float_eq(square / N, 1, 5 * 0.00317);
}

Test(rng, permute_is_a_bijection_that_depends_on_seed_and_stream)
{
    const uint64_t sizes[] = {1, 2, 3, 17, 64, 1000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint64_t n = sizes[s];
        char *seen = calloc(n, 1);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t p = nd_rng_permute(42, 0, n, i);
            cr_assert_lt(p, n);
            cr_assert(!seen[p], "%lu twice for n = %lu", (unsigned long)p, (unsigned long)n);
            seen[p] = 1;
        }
        free(seen);
    }
    uint64_t largest = 0; /* of more samples than 32 bits count */
    for (uint64_t i = 0; i < 100; i++) {
        const uint64_t p = nd_rng_permute(42, 0, (uint64_t)1 << 40, i);
        largest = p > largest ? p : largest;
    }
    cr_assert(largest >> 39 == 1);
    int same_seed = 0, same_stream = 0;
    for (uint64_t i = 0; i < 1000; i++) {
        same_seed += nd_rng_permute(1, 0, 1000, i) == nd_rng_permute(2, 0, 1000, i);
        same_stream += nd_rng_permute(1, 0, 1000, i) == nd_rng_permute(1, 1, 1000, i);
    }
    cr_assert_lt(same_seed, 20);
    cr_assert_lt(same_stream, 20);
}
