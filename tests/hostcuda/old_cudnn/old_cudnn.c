// SPDX-License-Identifier: Apache-2.0
/* A libcudnn.so.9 of a version that is too old, for the sentence that says so. With
 * ND_FAKE_CUDNN_VERSION it is new enough and makes a handle, but describes no graph. */
#include <stddef.h>
#include <stdlib.h>

size_t cudnnGetVersion(void);
size_t cudnnGetVersion(void)
{
    const char *text = getenv("ND_FAKE_CUDNN_VERSION");
    return text ? strtoul(text, NULL, 10) : 90100;
}

int cudnnCreate(void **out);
int cudnnCreate(void **out)
{
    *out = malloc(1);
    return *out ? 0 : 1;
}

int cudnnDestroy(void *handle);
int cudnnDestroy(void *handle)
{
    free(handle);
    return 0;
}
