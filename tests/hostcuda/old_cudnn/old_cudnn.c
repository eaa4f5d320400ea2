// SPDX-License-Identifier: Apache-2.0
/* A libcudnn.so.9 of a version that is too old, for the sentence that says so. */
#include <stddef.h>

size_t cudnnGetVersion(void);
size_t cudnnGetVersion(void)
{
    return 90100;
}
