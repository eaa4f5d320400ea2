// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stddef.h>
#include <string.h>

#include "tests/ops/conformance.h"

/* Removes each entry in turn: the error names the missing op. */
Test(table, a_missing_op_is_named)
{
    const nd_ops *complete;
    const size_t first =
        offsetof(nd_ops, product); /* the members before it are the name and properties */
    const size_t entries = (sizeof(nd_ops) - first) / sizeof(void (*)(void));
    static char seen[64][ND_ERROR_MESSAGE_MAX];
    ND_OK_OR_FAIL(nd_ops_ref(&complete));
    ND_OK_OR_FAIL(nd_ops_check(complete));
    cr_assert(entries <= sizeof seen / sizeof *seen);
    for (size_t i = 0; i < entries; i++) {
        nd_ops broken = *complete;
        memset((char *)&broken + first + i * sizeof(void (*)(void)), 0, sizeof(void (*)(void)));
        cr_assert(nd_ops_check(&broken) == ND_ERR_INTERNAL);
        strcpy(seen[i], nd_error_last()->message);
        cr_assert(strstr(seen[i], "\"ref\"") != NULL, "%s", seen[i]);
        for (size_t k = 0; k < i; k++) {
            cr_assert(strcmp(seen[k], seen[i]) != 0, "two ops have the error %s", seen[k]);
        }
    }
    nd_ops broken = *complete;
    broken.lse_merge = NULL;
    cr_assert(nd_ops_check(&broken) != ND_OK);
    cr_assert(strstr(nd_error_last()->message, "\"lse_merge\"") != NULL, "%s",
              nd_error_last()->message);
}
