// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/uv.h"

#include <uv.h>

nd_status nd_uv_check(int code, const char *call)
{
    return code >= 0 ? ND_OK
                     : nd_fail(ND_ERR_INTERNAL, "libuv: %s (in %.60s)", uv_strerror(code), call);
}
