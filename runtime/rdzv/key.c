// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/key.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/rdzv/address.h"

enum { HEX_BYTES = 2 * ND_KEY_BYTES };

nd_status nd_key_random(uint8_t key[ND_KEY_BYTES])
{
    ssize_t got;
    do {
        got = getrandom(key, ND_KEY_BYTES, 0);
    } while (got < 0 && errno == EINTR);
    if (got != ND_KEY_BYTES) {
        return nd_fail(ND_ERR_INTERNAL, "the system gives no random bytes for the job key: %s",
                       strerror(errno));
    }
    return ND_OK;
}

static nd_status make_text(char text[HEX_BYTES + 2])
{
    uint8_t key[ND_KEY_BYTES];
    ND_TRY(nd_key_random(key));
    for (int i = 0; i < ND_KEY_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", key[i]);
    }
    text[HEX_BYTES] = '\n';
    explicit_bzero(key, sizeof key);
    return ND_OK;
}

nd_status nd_key_make_file(const char *path)
{
    char text[HEX_BYTES + 2];
    ND_TRY(make_text(text));
    const int fd = nd_fs_create(path, 0600), error = errno;
    if (fd < 0) {
        explicit_bzero(text, sizeof text);
        return nd_fail(ND_ERR_CANTCREATE, "the key file %s cannot be made: %s%s", path,
                       strerror(error), error == EEXIST ? "; remove it or name another one" : "");
    }
    ssize_t wrote = write(fd, text, HEX_BYTES + 1);
    explicit_bzero(text, sizeof text);
    if (close(fd) != 0 || wrote != HEX_BYTES + 1) {
        unlink(path);
        return nd_fail(ND_ERR_CANTCREATE, "the key file %s cannot be written: %s", path,
                       strerror(errno));
    }
    return ND_OK;
}

static nd_status check_owner_and_mode(const char *path, const struct stat *st)
{
    if (st->st_uid != geteuid()) {
        return nd_fail(ND_ERR_CONFIG,
                       "the key file %s belongs to user %u, not to the user of this job (%u)", path,
                       (unsigned)st->st_uid, (unsigned)geteuid());
    }
    if (st->st_mode & (S_IRWXG | S_IRWXO)) {
        return nd_fail(
            ND_ERR_CONFIG,
            "the key file %s has mode %04o and can be used by others, so its key is not "
            "secret any more; make a new one with `ndlaunch --make-key FILE` (mode 0600)",
            path, (unsigned)(st->st_mode & 07777));
    }
    return ND_OK;
}

static bool decode(const char *text, size_t bytes, uint8_t key[ND_KEY_BYTES])
{
    if (bytes == ND_KEY_BYTES) {
        memcpy(key, text, ND_KEY_BYTES);
        return true;
    }
    bytes -= bytes == HEX_BYTES + 1 && text[HEX_BYTES] == '\n';
    if (bytes != HEX_BYTES) {
        return false;
    }
    for (int i = 0; i < ND_KEY_BYTES; i++) {
        int high = nd_hex_digit(text[2 * i]), low = nd_hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        key[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* Up to `capacity` bytes, until their end. */
static nd_status read_bytes(int fd, const char *name, char *text, size_t capacity, size_t *got)
{
    const int seconds = 60;
    int64_t deadline = nd_clock_ns() + (int64_t)seconds * 1000000000;
    for (*got = 0; *got < capacity;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int64_t left = (deadline - nd_clock_ns()) / 1000000;
        int ready = left > 0 ? poll(&p, 1, (int)left) : 0;
        if (ready == 0) {
            return nd_fail(ND_ERR_CONFIG, "no job key came over %s within %d s", name, seconds);
        }
        ssize_t n = ready > 0 ? read(fd, text + *got, capacity - *got) : -1;
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return nd_fail(ND_ERR_CONFIG, "the job key cannot be read from %s: %s", name,
                           strerror(errno));
        }
        if (n == 0) {
            break;
        }
        *got += n > 0 ? (size_t)n : 0;
    }
    return ND_OK;
}

static nd_status read_key(int fd, const char *name, uint8_t key[ND_KEY_BYTES])
{
    char text[HEX_BYTES + 2];
    size_t got = 0;
    nd_status status = read_bytes(fd, name, text, sizeof text, &got);
    if (status == ND_OK && !decode(text, got, key)) {
        status = nd_fail(ND_ERR_CONFIG,
                         "%s holds no key: it must give exactly %d bytes, or %d hexadecimal "
                         "digits, and gave %zu bytes%s",
                         name, ND_KEY_BYTES, HEX_BYTES, got, got == sizeof text ? " or more" : "");
    }
    explicit_bzero(text, sizeof text);
    return status;
}

nd_status nd_key_read_file(const char *path, uint8_t key[ND_KEY_BYTES])
{
    int fd = -1;
    struct stat st;
    char name[ND_SHARED_KEY_PATH_MAX + 16];
    snprintf(name, sizeof name, "the key file %s", path);
    ND_TRY(nd_fs_open(path, ND_ERR_CONFIG, &fd, &st));
    nd_status status = check_owner_and_mode(path, &st);
    status = status == ND_OK ? read_key(fd, name, key) : status;
    close(fd);
    return status;
}

nd_status nd_key_read(const char *name, uint8_t key[ND_KEY_BYTES])
{
    struct stat st;
    if (!name[0]) {
        return nd_key_random(key);
    }
    if (strcmp(name, "-") != 0) {
        return nd_key_read_file(name, key);
    }
    if (fstat(STDIN_FILENO, &st) == 0 && S_ISREG(st.st_mode)) {
        ND_TRY(check_owner_and_mode("on standard input", &st));
    }
    return read_key(STDIN_FILENO, "standard input", key);
}

nd_status nd_key_to_fd(const uint8_t key[ND_KEY_BYTES], int *fd)
{
    int made = memfd_create("nd-key", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (made < 0 || write(made, key, ND_KEY_BYTES) != ND_KEY_BYTES ||
        fcntl(made, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0) {
        nd_status status = nd_fail_system(errno, "the memory file of the job key");
        if (made >= 0) {
            close(made);
        }
        return status;
    }
    *fd = made;
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

/* Gives the key file that ND_RDZV_KEY_FILE names, or the path of a private one in `out`. */
static nd_status find_shared_file(const nd_identity *identity, char out[ND_SHARED_KEY_PATH_MAX],
                                  const char **named)
{
    const char *variable = getenv("ND_RDZV_KEY_FILE");
    *named = variable && variable[0] ? variable : NULL;
    if (*named) {
        return ND_OK;
    }
    if (identity->local_world_size != identity->world_size || !on_loopback(identity)) {
        return nd_fail(
            ND_ERR_CONFIG,
            "rank 0 would listen at %s, which is not loopback, without a job key; make one "
            "with `ndlaunch --make-key FILE`, copy it to all hosts, and name it in "
            "ND_RDZV_KEY_FILE",
            identity->master_addr);
    }
    const char *folder = getenv("XDG_RUNTIME_DIR");
    const bool usable = folder && strlen(folder) < ND_SHARED_KEY_PATH_MAX / 2 && folder[0] == '/' &&
                        access(folder, R_OK | W_OK) == 0;
    snprintf(out, ND_SHARED_KEY_PATH_MAX, "%s/ndtrain-key-%u-%d", usable ? folder : "/tmp",
             (unsigned)geteuid(), identity->master_port);
    return ND_OK;
}

nd_status nd_shared_key(const nd_identity *identity, uint8_t key[ND_KEY_BYTES],
                        char private_file[ND_SHARED_KEY_PATH_MAX])
{
    const char *named;
    char text[HEX_BYTES + 2];
    private_file[0] = '\0';
    ND_TRY(find_shared_file(identity, private_file, &named));
    if (!named && identity->rank == 0) {
        ND_TRY(make_text(text));
        nd_status status = nd_fs_write_atomic_as(private_file, 0600, text, HEX_BYTES + 1);
        explicit_bzero(text, sizeof text);
        ND_TRY(status == ND_OK ? ND_OK
                               : nd_fail(status,
                                         "the job key cannot be shared: %s; name a key file in "
                                         "ND_RDZV_KEY_FILE",
                                         nd_error_last()->message));
    }
    return nd_key_read_file(named ? named : private_file, key);
}
