// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_UCX_UCX_H
#define ND_COMM_UCX_UCX_H
/* libucp. It is opened with the first transport (ucx_library.c), for two reasons: commands without
 * other workers need none of it, and it reads a file of the working directory when it is loaded.
 * Only --version opens it without a transport. */
#include <stdbool.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include "runtime/base/status.h"

/* Its functions that are used. */
#define ND_UCX_FUNCTIONS(X)                                                                        \
    X(ucp_get_version_string)                                                                      \
    X(ucp_config_read)                                                                             \
    X(ucp_config_modify)                                                                           \
    X(ucp_config_release)                                                                          \
    X(ucp_init_version)                                                                            \
    X(ucp_cleanup)                                                                                 \
    X(ucp_worker_create)                                                                           \
    X(ucp_worker_destroy)                                                                          \
    X(ucp_worker_get_efd)                                                                          \
    X(ucp_worker_get_address)                                                                      \
    X(ucp_worker_release_address)                                                                  \
    X(ucp_worker_progress)                                                                         \
    X(ucp_worker_arm)                                                                              \
    X(ucp_ep_create)                                                                               \
    X(ucp_tag_send_nbx)                                                                            \
    X(ucp_tag_send_sync_nbx)                                                                       \
    X(ucp_tag_recv_nbx)                                                                            \
    X(ucp_tag_probe_nb)                                                                            \
    X(ucp_request_cancel)                                                                          \
    X(ucp_request_free)                                                                            \
    X(ucs_log_push_handler)                                                                        \
    X(ucs_status_string)

typedef struct ucx_library {
#define ND_UCX_MEMBER(name) __typeof__(&name) name;
    ND_UCX_FUNCTIONS(ND_UCX_MEMBER)
#undef ND_UCX_MEMBER
} ucx_library;
extern ucx_library nd_ucx;
/* Repeated calls are cheap. `warn`: of variables that the program overrides. */
nd_status nd_ucx_load(bool warn);

#endif
