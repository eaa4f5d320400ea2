// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_SHARED_KEY_H
#define ND_RDZV_SHARED_KEY_H
/*
 * The job key of a start without ndlaunch: from the file that ND_RDZV_KEY_FILE names, or, when all
 * ranks are on one host and the store listens on loopback, from a file that rank 0 puts into the
 * user's private runtime folder.
 */
#include <stdint.h>

#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/tls.h"

enum { ND_SHARED_KEY_PATH_MAX = 512 };

/* The file to use. ND_ERR_CONFIG where several hosts would need one and none is named. */
nd_status nd_shared_key_path(const nd_identity *identity, char out[ND_SHARED_KEY_PATH_MAX],
                             bool *private_file);
/* Rank 0, private file: writes a fresh key in place of what a former job left. */
nd_status nd_shared_key_publish(const char *path, uint8_t key[ND_KEY_BYTES]);

#endif
