// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_sinks FOLDER: what the reports of a step cost the run. Sends the records of 10,000 steps
 * to metrics.jsonl, to the terminal's log (a file here, a line every log.interval steps) and to
 * TensorBoard, each alone and all together, in files below FOLDER. Prints one JSON line:
 * microseconds of a step for each, as the run's thread waits for them. wandb and trackio add one
 * waitpid to what metrics.jsonl takes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "trainer/report/report.h"

enum { STEPS = 10000 };

typedef nd_status sink_open(const nd_report_options *options, nd_sink *out);

/* FOLDER/<number>, with stderr in its file "log". */
static nd_status make_folder(const char *in, int number, char **out)
{
    char *log = NULL;
    ND_TRY(nd_fs_format(out, "%s/%d", in, number));
    ND_TRY(nd_fs_make_folders(*out, "the folder", "name another one"));
    ND_TRY(nd_fs_format(&log, "%s/log", *out));
    int fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    nd_status status = fd >= 0 && dup2(fd, STDERR_FILENO) >= 0
                           ? ND_OK
                           : nd_fail(ND_ERR_CANTCREATE, "%s: %s", log, strerror(errno));
    if (fd >= 0) {
        close(fd);
    }
    free(log);
    return status;
}

static nd_status send_steps(nd_sinks *sinks, double *seconds)
{
    const double begin = nd_clock_seconds();
    for (int64_t step = 1; step <= STEPS; step++) {
        const double part = (double)step / STEPS;
        const nd_step_record record = {.step = step,
                                       .loss = 10.0 / (1.0 + 3.7 * part),
                                       .grad_norm = 1.0 / (3.0 + part),
                                       .lr = 3e-4 * (1.0 - part / 3.0),
                                       .tokens = 16368,
                                       .tokens_seen = 16368 * step,
                                       .step_seconds = 0.123 + part / 7.0,
                                       .data_wait_seconds = part / 9000.0,
                                       .peak_memory_bytes = 1234567890.0,
                                       .wire_bytes = {123456789, 246913578, 12345678, 0, 1234}};
        ND_TRY(nd_sinks_put(sinks, step, (nd_record){.step = &record}));
    }
    *seconds = nd_clock_seconds() - begin;
    return ND_OK;
}

/* Microseconds of a step. */
static nd_status measure(const nd_report_options *base, sink_open *const *opens, int count,
                         int number, double *out)
{
    nd_report_options options = *base;
    nd_sinks sinks = {0};
    char *folder = NULL;
    double seconds = 0.0;
    nd_status status = make_folder(base->dir, number, &folder);
    options.dir = folder;
    status = status == ND_OK ? nd_writer_open(60.0, 2 << 20, &sinks.writer) : status;
    options.writer = sinks.writer;
    for (int i = 0; i < count && status == ND_OK; i++) {
        nd_sink sink;
        status = opens[i](&options, &sink);
        if (status == ND_OK) {
            nd_sinks_add(&sinks, sink);
        }
    }
    if (status == ND_OK) {
        status = send_steps(&sinks, &seconds);
    }
    nd_sinks_close(&sinks);
    free(folder);
    *out = seconds / STEPS * 1e6;
    return status;
}

int main(int argc, char **argv)
{
    static const nd_shape shape = {.vocab = 32000,
                                   .hidden = 512,
                                   .ffn = 1408,
                                   .layers = 8,
                                   .heads = 8,
                                   .kv_heads = 4,
                                   .head_dim = 64};
    static sink_open *const opens[] = {nd_jsonl_sink_open, nd_terminal_sink_open,
                                       nd_tensorboard_sink_open};
    nd_config config;
    double each[3] = {0}, all = 0;
    nd_status status = nd_config_init(&config);
    if (argc != 2) {
        fprintf(stderr, "usage: nd_bench_sinks FOLDER\n");
        return 2;
    }
    config.train.steps = STEPS;
    const nd_report_options options = {.config = &config,
                                       .shape = &shape,
                                       .dir = argv[1],
                                       .world_size = 8,
                                       .tokens_per_step = 16384};
    for (int i = 0; i < 3 && status == ND_OK; i++) {
        status = measure(&options, &opens[i], 1, i, &each[i]);
    }
    if (status == ND_OK) {
        status = measure(&options, opens, 3, 3, &all);
    }
    nd_config_fini(&config);
    if (status != ND_OK) {
        printf("nd_bench_sinks: %s\n", nd_error_last()->message); /* stderr may be a file */
        return 1;
    }
    printf("{\"metrics_us\": %.3f, \"terminal_us\": %.3f, \"tensorboard_us\": %.3f, \"all_us\": "
           "%.3f}\n",
           each[0], each[1], each[2], all);
    return 0;
}
