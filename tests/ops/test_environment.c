// SPDX-License-Identifier: Apache-2.0
/* Which names of the environment the CPU ops take and which they refuse. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "kernels/ops.h"
#include "runtime/device/device.h"
#include "tests/ops/conformance.h"

/* Returns the message of the ops when the environment sets `name`; NULL: there is none. */
static const char *said_of(const char *name, const char *value)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    nd_error_clear();
    setenv(name, value, 1);
    ND_OK_OR_FAIL(nd_device_open_cpu(1, &device));
    const nd_status status = nd_ops_cpu(device, &ops);
    nd_device_close(device);
    unsetenv(name);
    cr_assert(status == ND_OK || status == ND_ERR_CONFIG);
    return status == ND_OK ? NULL : nd_error_last()->message;
}

Test(environment, names_that_nobody_reads_are_refused)
{
    cr_expect_str_eq(said_of("ND_CPU_PACKD", "anew"),
                     "the environment sets ND_CPU_PACKD, which ndtrain does not know; did you mean "
                     "ND_CPU_PACKED?");
    cr_expect_str_eq(said_of("ND_CPU_Isa", "anew"),
                     "the environment sets ND_CPU_Isa, which ndtrain does not know; did you mean "
                     "ND_CPU_ISA?");
    cr_expect_str_eq(said_of("ND_CPU_ANYTHING_ELSE_AT_ALL", "anew"),
                     "the environment sets ND_CPU_ANYTHING_ELSE_AT_ALL, which ndtrain does not "
                     "know; unset it, or use ND_CPU_ISA, ND_CPU_PACKED or ND_CPU_PRODUCTS");
}

Test(environment, empty_values_and_other_names_are_taken)
{
    cr_expect_null(said_of("ND_CPU_ISA", ""));
    cr_expect_null(said_of("ND_CPU_PACKED", ""));
    cr_expect_null(said_of("ND_CPU_PRODUCTS", ""));
    cr_expect_null(said_of("ND_CPU_PACKD", ""));
    cr_expect_null(said_of("ND_CPU", "anew"));
    cr_expect_null(said_of("XND_CPU_ISB", "anew"));
}
