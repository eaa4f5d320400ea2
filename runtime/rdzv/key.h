// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_KEY_H
#define ND_RDZV_KEY_H
/*
 * The job key: 32 random bytes that every member of a job proves to have. It travels over an
 * inherited descriptor to local workers, and in a file of mode 0600 or over standard input to other
 * nodes; never in an argument or the environment.
 */
#include <stdint.h>

#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/tls.h"

nd_status nd_key_random(uint8_t key[ND_KEY_BYTES]);

/* Writes a fresh key as 64 hexadecimal digits into a new file of mode 0600. ND_ERR_CANTCREATE, also
 * when it exists. */
nd_status nd_key_make_file(const char *path);
/*
 * 32 raw bytes, or 64 hexadecimal digits with or without a newline. ND_ERR_CONFIG when the file is
 * missing, not this user's, open to group or others, or of another size.
 */
nd_status nd_key_read_file(const char *path, uint8_t key[ND_KEY_BYTES]);
/*
 * The job's key: from a file; for "-" the same content from standard input, as srun passes it on to
 * its tasks, so that the key is on no disk of their nodes; for "" a new one. A regular file on
 * standard input must be as above. ND_ERR_CONFIG when it holds no key, or no input arrives within
 * 60 s.
 */
nd_status nd_key_read(const char *name, uint8_t key[ND_KEY_BYTES]);

/* An anonymous, sealed file that holds the key; *fd is close-on-exec and owned by the caller. */
nd_status nd_key_to_fd(const uint8_t key[ND_KEY_BYTES], int *fd);

enum { ND_SHARED_KEY_PATH_MAX = 512 };

/*
 * The key of a start without ndlaunch: from the file that ND_RDZV_KEY_FILE names, or, when all
 * ranks are on one host and the store listens on loopback, from a file that rank 0 makes in
 * $XDG_RUNTIME_DIR or /tmp, in place of an earlier job's: private_file, else "". ND_ERR_CONFIG
 * where several hosts need a key file and none is named, or on another rank while rank 0 has not
 * made the file.
 */
nd_status nd_shared_key(const nd_identity *identity, uint8_t key[ND_KEY_BYTES],
                        char private_file[ND_SHARED_KEY_PATH_MAX]);

#endif
