// SPDX-License-Identifier: Apache-2.0
/*
 * Opens the sinks of a run. That for wandb and trackio is here: it starts scripts/wandb_sync.py
 * beside the run, which follows metrics.jsonl and sends it. That program may lag, fail, or outlive
 * the run by what it still has to send; the run never waits for it. It writes to wandb_sync.log in
 * the run's folder, that for trackio to trackio_sync.log.
 */
#include "trainer/report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"

enum { STANDARD_STREAMS = 3, ROOM_BYTES = 2 << 20, DEADLINE_SECONDS = 10 };

typedef struct follower {
    pid_t pid;
    char *log; /* path, owned */
} follower;

/* Beside a build folder, or where `meson install` puts it. */
static nd_status find_script(char **out)
{
    static const char *const places[] = {"../scripts", "../share/ndtrain"};
    char self[4096];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    self[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(self, '/');
    for (size_t i = 0; slash && i < sizeof places / sizeof *places; i++) {
        ND_TRY(nd_fs_format(out, "%.*s/%s/wandb_sync.py", (int)(slash - self), self, places[i]));
        bool there = false;
        ND_TRY(nd_fs_exists(*out, &there));
        if (there) {
            return ND_OK;
        }
        free(*out);
        *out = NULL;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "log.trackers needs wandb_sync.py, which is neither in scripts/ beside the "
                   "build folder nor in share/ndtrain beside bin/; install it there");
}

/* In a session of its own, so that a signal for the job does not end it, and without what the
 * worker has open, such as the job's key. `nothing` is its input, `log` its output. */
static int spawn(const char *const *args, int nothing, int log, pid_t *pid)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    int error = posix_spawn_file_actions_init(&files);
    if (error != 0) {
        return error;
    }
    error = posix_spawnattr_init(&attributes);
    if (error == 0) {
        sigset_t none;
        sigemptyset(&none);
        posix_spawnattr_setsigmask(&attributes, &none);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
        posix_spawn_file_actions_adddup2(&files, nothing, STDIN_FILENO);
        posix_spawn_file_actions_adddup2(&files, log, STDOUT_FILENO);
        posix_spawn_file_actions_adddup2(&files, log, STDERR_FILENO);
        error = posix_spawn_file_actions_addclosefrom_np(&files, STANDARD_STREAMS);
        error = error == 0
                    ? posix_spawnp(pid, args[0], &files, &attributes, (char *const *)args, environ)
                    : error;
        posix_spawnattr_destroy(&attributes);
    }
    posix_spawn_file_actions_destroy(&files);
    return error;
}

static nd_status write_step(void *self, const nd_step_record *record)
{
    follower *f = self;
    int code = 0;
    if (waitpid(f->pid, &code, WNOHANG) == 0) {
        return ND_OK;
    }
    f->pid = 0;
    return nd_fail(ND_ERR_IO, "wandb_sync.py has ended with %d before the run; %s says why",
                   WIFEXITED(code) ? WEXITSTATUS(code) : 128 + WTERMSIG(code), f->log);
}

/* It ends by itself when it has sent everything that this process wrote. */
static void close_follower(void *self)
{
    follower *f = self;
    free(f->log);
    free(f);
}

/* wandb or trackio, as out->name says. ND_ERR_CONFIG: it cannot be started; ND_ERR_CANTCREATE: its
 * log cannot be written, or is a link or no file. */
static nd_status open_follower(const nd_report_options *options, nd_sink *out)
{
    const nd_config *config = options->config;
    const char *const library = out->name;
    follower *f = NULL;
    char *script = NULL, pid[24];
    int log = -1, nothing = -1;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(1, &f));
    ND_TRY_OUT(nd_fs_format(&f->log, "%s/%s_sync.log", options->dir, library));
    log = nd_fs_update(f->log, O_APPEND);
    if (log < 0) {
        status =
            nd_fail(ND_ERR_CANTCREATE, "%s cannot be created: %s", f->log, nd_fs_reason(errno));
        goto out;
    }
    ND_TRY_OUT(find_script(&script));
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    const char *const args[] = {
        config->log.python, script, options->dir, "--with", library, "--pid", pid, NULL};
    nothing = nd_fs_open_kernel("/dev/null");
    int error = nothing >= 0 ? spawn(args, nothing, log, &f->pid) : errno;
    if (error != 0) {
        status = nd_fail(ND_ERR_CONFIG,
                         "log.python, %s, cannot be started: %s; name a Python that has %s "
                         "(--tracker-python)",
                         config->log.python, strerror(error), library);
        goto out;
    }
    nd_log_info("%s: wandb_sync.py follows the run (%s)", library, f->log);
    *out = (nd_sink){.name = library, .self = f, .step = write_step, .close = close_follower};
    f = NULL;
out:
    if (f) {
        close_follower(f);
    }
    if (log >= 0) {
        close(log);
    }
    if (nothing >= 0) {
        close(nothing);
    }
    free(script);
    return status;
}

nd_status nd_sinks_open(nd_sinks *sinks, const nd_report_options *options)
{
    const nd_config *config = options->config;
    const struct {
        const char *name;
        nd_status (*open)(const nd_report_options *, nd_sink *);
        bool wanted, tracks;
    } all[] = {
        {"metrics.jsonl", nd_jsonl_sink_open, true, false},
        {"the terminal", nd_terminal_sink_open, true, false},
        {"TensorBoard", nd_tensorboard_sink_open, nd_config_tracks(config, ND_TRACKER_TENSORBOARD),
         true},
        {"wandb", open_follower, nd_config_tracks(config, ND_TRACKER_WANDB), true},
        {"trackio", open_follower, nd_config_tracks(config, ND_TRACKER_TRACKIO), true},
    };
    nd_report_options given = *options;
    *sinks = (nd_sinks){0};
    ND_TRY(nd_writer_open(DEADLINE_SECONDS, ROOM_BYTES, &sinks->writer));
    given.writer = sinks->writer;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        nd_sink sink = {.name = all[i].name};
        const nd_status status = all[i].wanted ? all[i].open(&given, &sink) : ND_OK;
        if (status == ND_OK && all[i].wanted) {
            nd_sinks_add(sinks, sink);
        } else if (status != ND_OK && status != ND_ERR_CANTCREATE && all[i].tracks) {
            nd_sinks_warn_of_dropped(all[i].name);
        } else if (status != ND_OK) {
            nd_sinks_close(sinks);
            return status;
        }
    }
    return ND_OK;
}
