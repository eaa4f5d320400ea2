// SPDX-License-Identifier: Apache-2.0
/* Any bytes as a model's config.json; the numbers of one that passes must stay within 64 bits. */
#include "tests/fuzz/fuzz.h"
#include "trainer/layout/layout.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_shape shape;
    nd_mesh mesh = {{1, 2, 2, 2, 2}};
    if (nd_shape_parse((const char *)data, size, "fuzz.json", &shape) == ND_OK) {
        ND_ASSERT(nd_shape_parameters(&shape) > 0);
        (void)nd_shape_check_mesh(&shape, &mesh, 2, 64);
    }
    return 0;
}
