// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/shared_key.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/rdzv/address.h"
#include "runtime/rdzv/key.h"

/* $XDG_RUNTIME_DIR is private by its contract; else a folder below /tmp that must be this user's
 * alone. */
static nd_status private_folder(char *out, size_t capacity)
{
    struct stat st;
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    if (runtime && runtime[0] == '/' && strlen(runtime) < capacity / 2 && stat(runtime, &st) == 0) {
        snprintf(out, capacity, "%s", runtime);
    } else {
        snprintf(out, capacity, "/tmp/ndtrain-%u", (unsigned)geteuid());
        if (mkdir(out, 0700) != 0 && errno != EEXIST) {
            return nd_fail(ND_ERR_CANTCREATE, "the folder %s for the job key cannot be made: %s",
                           out, strerror(errno));
        }
    }
    if (lstat(out, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid() ||
        (st.st_mode & (S_IRWXG | S_IRWXO))) {
        return nd_fail(
            ND_ERR_CONFIG,
            "the folder %s must be yours alone (mode 0700) to hold the job key; remove it, "
            "or name a key file in ND_RDZV_KEY_FILE",
            out);
    }
    return ND_OK;
}

static bool on_loopback(const nd_identity *identity)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    if (nd_address_resolve(identity->master_addr, identity->master_port, addresses, &count) !=
        ND_OK) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        if (!nd_address_is_loopback(&addresses[i])) {
            return false;
        }
    }
    return true;
}

nd_status nd_shared_key_path(const nd_identity *identity, char out[ND_SHARED_KEY_PATH_MAX],
                             bool *private_file)
{
    const char *named = getenv("ND_RDZV_KEY_FILE");
    *private_file = !named || !named[0];
    if (!*private_file) {
        if (snprintf(out, ND_SHARED_KEY_PATH_MAX, "%s", named) >= ND_SHARED_KEY_PATH_MAX) {
            return nd_fail(ND_ERR_CONFIG, "ND_RDZV_KEY_FILE is longer than %d characters",
                           ND_SHARED_KEY_PATH_MAX - 1);
        }
        return ND_OK;
    }
    if (identity->local_world_size != identity->world_size || !on_loopback(identity)) {
        return nd_fail(
            ND_ERR_CONFIG,
            "rank 0 would listen at %s, which is not loopback, without a job key: make one "
            "with `ndlaunch --make-key FILE`, copy it to all hosts, and name it in "
            "ND_RDZV_KEY_FILE",
            identity->master_addr);
    }
    char folder[ND_SHARED_KEY_PATH_MAX / 2];
    ND_TRY(private_folder(folder, sizeof folder));
    snprintf(out, ND_SHARED_KEY_PATH_MAX, "%s/ndtrain-key-%d", folder, identity->master_port);
    return ND_OK;
}

nd_status nd_shared_key_publish(const char *path, uint8_t key[ND_KEY_BYTES])
{
    char fresh[ND_SHARED_KEY_PATH_MAX + 32];
    snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid());
    unlink(fresh);
    ND_TRY(nd_key_make_file(fresh));
    if (rename(fresh, path) != 0) {
        nd_status status = nd_fail(ND_ERR_CANTCREATE, "the key file %s cannot be put in place: %s",
                                   path, strerror(errno));
        unlink(fresh);
        return status;
    }
    return nd_key_read_file(path, key);
}
