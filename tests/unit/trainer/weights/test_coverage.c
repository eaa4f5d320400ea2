// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/weights/coverage.h"

Test(coverage, agrees_with_a_map_of_elements)
{
    enum { N = 40, PIECES = 30 };
    for (uint64_t round = 0; round < 500; round++) {
        nd_coverage coverage = {0};
        char written[N] = {0};
        for (uint64_t i = 0; i < PIECES; i++) {
            int64_t begin = (int64_t)(nd_rng_u64(1, round, 2 * i) % N);
            int64_t end = begin + (int64_t)(nd_rng_u64(1, round, 2 * i + 1) % 6);
            end = end < N ? end : N;
            assert_ok(nd_coverage_add(&coverage, begin, end));
            memset(written + begin, 1, (size_t)(end - begin));
            int64_t gap = 0;
            while (gap < N && written[gap]) {
                gap++;
            }
            cr_assert_eq(nd_coverage_first_gap(&coverage, N), gap);
            for (int64_t r = 0; r < coverage.count; r++) {
                cr_assert_lt(coverage.ranges[r].begin, coverage.ranges[r].end);
                cr_assert(r == 0 || coverage.ranges[r - 1].end < coverage.ranges[r].begin);
            }
        }
        nd_coverage_fini(&coverage);
    }
}

Test(coverage, of_nothing)
{
    nd_coverage coverage = {0};
    cr_assert_eq(nd_coverage_first_gap(&coverage, 0), 0);
    cr_assert_eq(nd_coverage_first_gap(&coverage, 5), 0);
    assert_ok(nd_coverage_add(&coverage, 3, 3));
    cr_assert_eq(coverage.count, 0);
    nd_coverage_fini(&coverage);
}
