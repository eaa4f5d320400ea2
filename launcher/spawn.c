// SPDX-License-Identifier: Apache-2.0
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/job.h"

extern char **environ;

enum { FIRST_FD = 3, FD_COUNT = 4, OWN_VARIABLES = 20, VARIABLE_MAX = 1024 };

/* Our variables over the inherited environment; what came from an outer launcher is left out. */
static nd_status make_environment(const nd_job *job, int local_rank,
                                  char text[OWN_VARIABLES][VARIABLE_MAX], char ***out)
{
    static const char *const names[] = {
        "RANK",           "LOCAL_RANK",     "WORLD_SIZE",   "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",    "MASTER_PORT",    "ND_RUN_ID",    "ND_KEY_FD",
        "ND_PROGRESS_FD", "ND_FAILURE_FD",  "ND_CONFIG_FD", "ND_LAUNCHER_PID",
        "ND_TERMINAL",    "ND_CONFIG_NAME", "ND_NODE_RANK", "ND_NNODES",
    };
    enum { COUNT = sizeof names / sizeof *names };
    char port[16], pid[24], ranks[6][16];
    snprintf(port, sizeof port, "%d", job->master_port);
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    snprintf(ranks[0], sizeof ranks[0], "%d", job->workers[local_rank].rank);
    snprintf(ranks[1], sizeof ranks[1], "%d", local_rank);
    snprintf(ranks[2], sizeof ranks[2], "%d", job->world_size);
    snprintf(ranks[3], sizeof ranks[3], "%d", job->local_workers);
    snprintf(ranks[4], sizeof ranks[4], "%lld", (long long)job->config->launch.node_rank);
    snprintf(ranks[5], sizeof ranks[5], "%lld", (long long)job->config->launch.nnodes);
    const char *values[COUNT] = {
        ranks[0],
        ranks[1],
        ranks[2],
        ranks[3],
        job->master_addr,
        port,
        job->run_id,
        "3",
        "4",
        "5",
        "6",
        pid,
        isatty(STDERR_FILENO) && job->workers[local_rank].rank == 0 ? "1" : "0",
        job->config->source,
        ranks[4],
        ranks[5],
    };
    int inherited = 0, n = 0;
    while (environ[inherited]) {
        inherited++;
    }
    char **env = NULL;
    ND_TRY(ND_ALLOC(inherited + COUNT + 1, &env));
    for (int i = 0; i < inherited; i++) {
        bool ours = false;
        for (int k = 0; k < COUNT; k++) {
            size_t length = strlen(names[k]);
            ours |= strncmp(environ[i], names[k], length) == 0 && environ[i][length] == '=';
        }
        if (!ours) {
            env[n++] = environ[i];
        }
    }
    for (int k = 0; k < COUNT; k++) {
        snprintf(text[k], VARIABLE_MAX, "%s=%s", names[k], values[k]);
        env[n++] = text[k];
    }
    *out = env;
    return ND_OK;
}

nd_status nd_job_spawn(nd_job *job, int local_rank, uv_exit_cb on_exit)
{
    nd_launched *worker = &job->workers[local_rank];
    char text[OWN_VARIABLES][VARIABLE_MAX];
    char **env = NULL;
    ND_TRY(nd_output_open(&worker->out, worker, false));
    ND_TRY(nd_output_open(&worker->err, worker, true));
    ND_TRY(make_environment(job, local_rank, text, &env));
    const int fds[FD_COUNT] = {job->key_fd, job->progress.fd, job->failures.fd, job->config_fd};
    uv_stdio_container_t stdio[FIRST_FD + FD_COUNT] = {
        {.flags = UV_IGNORE},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&worker->out.pipe},
        {.flags = (uv_stdio_flags)(UV_CREATE_PIPE | UV_WRITABLE_PIPE),
         .data.stream = (uv_stream_t *)&worker->err.pipe},
    };
    for (int i = 0; i < FD_COUNT; i++) {
        stdio[FIRST_FD + i] = (uv_stdio_container_t){.flags = UV_INHERIT_FD, .data.fd = fds[i]};
    }
    char *args[] = {(char *)job->program, "train", NULL};
    uv_process_options_t options = {
        .exit_cb = on_exit,
        .file = job->program,
        .args = args,
        .env = env,
        .flags =
            UV_PROCESS_DETACHED, /* its own session: a terminal's signals reach ndlaunch only, which forwards them */
        .stdio_count = FIRST_FD + FD_COUNT,
        .stdio = stdio,
    };
    worker->process.data = worker;
    int code = uv_spawn(&job->loop, &worker->process, &options);
    free(env);
    if (code != 0) {
        return nd_fail(ND_ERR_IO, "the worker program %s cannot be started: %s", job->program,
                       uv_strerror(code));
    }
    worker->running = true;
    job->running++;
    nd_output_start(&worker->out);
    nd_output_start(&worker->err);
    return ND_OK;
}
