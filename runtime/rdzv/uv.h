// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_UV_H
#define ND_RDZV_UV_H
/* Calls of libuv: ND_TRY(ND_UV(uv_loop_init(&loop))). */
#include <uv.h>

#include "runtime/base/status.h"

#define ND_UV(call) nd_uv_check((call), #call)

/* ND_OK for codes from 0 up. Otherwise ND_ERR_RESOURCE (no memory) or ND_ERR_INTERNAL, with libuv's
 * reason and the call. */
static inline nd_status nd_uv_check(int code, const char *call)
{
    return code >= 0 ? ND_OK
           : code == UV_ENOMEM
               ? nd_fail_memory("libuv (%.60s)", call)
               : nd_fail(ND_ERR_INTERNAL, "libuv: %s (in %.60s)", uv_strerror(code), call);
}

#endif
