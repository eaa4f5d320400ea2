// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_PREFLIGHT_H
#define ND_LAUNCHER_PREFLIGHT_H
/* The worker program's own check of configuration, model and data, once, before any worker
 * starts. */
#include "runtime/config/config.h"

/* The worker program: $ND_WORKER, or ndtrain beside this program. ND_ERR_CONFIG when it is not
 * there. */
nd_status nd_preflight_find_worker(char *path, int capacity);
/*
 * Raises the limit of open files to what the user is allowed. ND_ERR_CONFIG with both numbers when
 * that is less than this node of the job needs.
 */
nd_status nd_preflight_check_files(const nd_config *config);
/*
 * Runs `<program> check`, for at most `seconds`, with the resolved configuration behind config_fd,
 * read from the file config_name. Its sentence goes to stderr and its code to *exit_code; its lines
 * "digest NAME HEX" go to digests as "NAME=HEX". ND_ERR_CONFIG when it is of another version: both
 * are named.
 */
nd_status nd_preflight_run(const char *program, int config_fd, const char *config_name,
                           double seconds, char *digests, size_t capacity, int *exit_code);

#endif
