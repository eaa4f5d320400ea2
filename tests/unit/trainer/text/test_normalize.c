// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/text/parts.h"

enum { SIZE = 200, ROOM = SIZE * 16 };

/* The definition of a replacement, for a `from` of one or two bytes. */
static size_t replace_plainly(const nd_rewrite *step, const uint8_t *text, size_t size,
                              uint8_t *out)
{
    size_t count = 0;
    for (size_t at = 0; at < size;) {
        if (size - at >= step->from_size && memcmp(text + at, step->from, step->from_size) == 0) {
            memcpy(out + count, step->to, step->to_size);
            count += step->to_size;
            at += step->from_size;
        } else {
            out[count++] = text[at++];
        }
    }
    return count;
}

/* Short and long replacements of one byte and of two, in memory that ends with the text. */
Test(normalize, all_hits_are_replaced)
{
    static uint8_t expected[ROOM];
    for (uint64_t seed = 0; seed < 4000; seed++) {
        const uint64_t base = nd_rng_u64(seed, 1, 0);
        const size_t size = 1 + base % SIZE;
        char from[] = "  ", to[] = "\xe2\x96\x81 long end";
        nd_rewrite step = {.from = from, .to = to, .from_size = 1 + seed % 2};
        step.to_size = (base >> 16) % sizeof to;
        uint8_t *text = malloc(size);
        nd_bytes buffers[2] = {0};
        const uint8_t *out;
        size_t out_size;
        cr_assert_not_null(text);
        for (size_t i = 0; i < size; i++) {
            text[i] = nd_rng_u64(seed, 2, i) % 3 ? 'a' : ' ';
        }
        const size_t expected_size = replace_plainly(&step, text, size, expected);
        assert_ok(nd_text_rewrite(&step, 1, text, size, buffers, &out, &out_size));
        cr_assert_eq(out_size, expected_size, "seed %d", (int)seed);
        cr_assert_eq(out_size > 0 && memcmp(out, expected, out_size) != 0, 0);
        free(buffers[0].data);
        free(buffers[1].data);
        free(text);
    }
}
