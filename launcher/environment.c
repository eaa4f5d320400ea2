// SPDX-License-Identifier: Apache-2.0
#include "launcher/launcher.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A worker's identity, which is never taken from the environment of ndlaunch. */
static const char *const identity[] = {
    "RANK",        "LOCAL_RANK",       "WORLD_SIZE",    "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "ND_RUN_ID",        "ND_KEY_FD",     "ND_PROGRESS_FD",   "ND_CONFIG_FD",
    "ND_NNODES",   "ND_RESTART_EPOCH", "ND_RUN_FOLDER", "ND_LAUNCHER_PID",  "ND_CONFIG_NAME",
    "ND_TERMINAL", "ND_NODE_RANK",
};

static bool is_name(const char *variable, const char *name)
{
    size_t length = strlen(name);
    return strncmp(variable, name, length) == 0 && variable[length] == '=';
}

static bool is_replaced(const char *variable, const nd_variable *own, int count)
{
    for (size_t i = 0; i < sizeof identity / sizeof *identity; i++) {
        if (is_name(variable, identity[i])) {
            return true;
        }
    }
    for (int i = 0; i < count; i++) {
        if (is_name(variable, own[i].name)) {
            return true;
        }
    }
    return false;
}

nd_status nd_environment_make(const nd_variable *own, int count, char ***out)
{
    size_t inherited = 0, text_bytes = 0;
    char *block, **env;
    while (environ[inherited]) {
        inherited++;
    }
    for (int i = 0; i < count; i++) {
        text_bytes += strlen(own[i].name) + strlen(own[i].value) + 2;
    }
    size_t pointers = (inherited + (size_t)count + 1) * sizeof *env;
    ND_TRY(ND_ALLOC(pointers + text_bytes, &block));
    env = (char **)(void *)block;
    char *text = block + pointers;
    *out = env;
    for (size_t i = 0; i < inherited; i++) {
        if (!is_replaced(environ[i], own, count)) {
            *env++ = environ[i];
        }
    }
    for (int i = 0; i < count; i++) {
        *env++ = text;
        text += sprintf(text, "%s=%s", own[i].name, own[i].value) + 1;
    }
    return ND_OK;
}

nd_status nd_config_to_fd(const nd_config *config, int *fd)
{
    char *text = NULL;
    ND_TRY(nd_config_to_yaml(config, true, &text));
    size_t bytes = strlen(text);
    *fd = memfd_create("nd-config", MFD_CLOEXEC);
    ssize_t written = *fd >= 0 ? write(*fd, text, bytes) : -1;
    int code = written < 0 ? errno : EFBIG; /* a limit of file sizes cuts the text off */
    free(text);
    return written == (ssize_t)bytes
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE,
                         "the configuration, %zu bytes, cannot be handed down to the workers: %s; "
                         "raise the limits of this shell (ulimit -f)",
                         bytes, strerror(code));
}
