// SPDX-License-Identifier: Apache-2.0
/*
 * `ndtrain train` whose losses and events the test makes, for check_run.py:
 *
 *   test_run SEEN EVENTS train [flags]
 *
 * The loss of a label follows from the label, and in a validation from the step too, so that a
 * plain model knows it; sums of such numbers are exact. Weights and gradients are real.
 *
 * EVENTS, as T12n,V3t: at micro-batch 12 of this start's steps a NaN in the loss, at batch 3 of its
 * validations a TERM. n: NaN; s: a spike; d: damage to the newest checkpoint, and NaN; t: TERM; k:
 * KILL. B0t: TERM before the loop.
 *
 * The file SEEN gets the first byte of each training sample; a line for each forward, with what it
 * is of (T: a step, V: a validation, P: sample texts), the step, a digest of the embedding and the
 * first id of each row; and at the end what ndlaunch would read.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/commands/command.h"

enum { SAMPLES = 4000, ROWS_MAX = 8 };

static struct {
    const char *events;
    nd_worker worker;
    nd_ops ops;
    const nd_ops *real;
    FILE *seen;
    int64_t sequence, step, row_count;
    int32_t rows[ROWS_MAX]; /* first ids of the forward that has begun */
    uint32_t weights;
    bool begun;    /* and its line is not written yet */
    int counts[2]; /* of T and V */
    char event;    /* of this forward; 0: none */
} here = {.worker.gate = ND_GATE_INIT};

/* Returns the event at number `at` of a kind, the n of T12n; 0: there is none. */
static char event_at(char kind, int at)
{
    for (const char *p = here.events; p; p = strchr(p, ',')) {
        char of, what;
        int number;
        p += *p == ',';
        if (sscanf(p, "%c%d%c", &of, &number, &what) == 3 && of == kind && number == at) {
            return what;
        }
    }
    return 0;
}

static void damage_newest(const char *run)
{
    char path[256], last[256] = "", file[600];
    nd_fs_names names;
    nd_folder *list = NULL;
    int count = 0;
    struct stat st;
    ND_ASSERT(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &count) == ND_OK && count > 0);
    snprintf(path, sizeof path, "%s/checkpoint-%lld/state", run, (long long)list[count - 1].step);
    ND_ASSERT(nd_fs_list(path, &names) == ND_OK);
    for (int i = 0; i < names.count; i++) {
        if (strstr(names.list[i], ".safetensors") && strcmp(names.list[i], last) > 0) {
            snprintf(last, sizeof last, "%s", names.list[i]);
        }
    }
    snprintf(file, sizeof file, "%s/%s", path, last);
    ND_ASSERT(stat(file, &st) == 0 && truncate(file, st.st_size - 1) == 0);
    nd_fs_names_fini(&names);
    free(list);
}

static void write_forward(char kind)
{
    fprintf(here.seen, "%c %lld %08x", kind, (long long)here.step, here.weights);
    for (int64_t i = 0; i < here.row_count; i++) {
        fprintf(here.seen, " %d", here.rows[i]);
    }
    fputc('\n', here.seen);
    fflush(here.seen);
    here.begun = false;
}

/* Each forward begins with it; one that has no loss is of sample texts. */
static nd_status embedding(nd_stream *stream, const nd_embedding_fwd_args *a)
{
    const unsigned char *table = a->table.data;
    if (here.begun) {
        write_forward('P');
    }
    here.begun = true;
    here.step = here.worker.rank.progress->step;
    here.row_count = a->ids.shape[0] / here.sequence;
    ND_ASSERT(here.row_count <= ROWS_MAX);
    for (int64_t i = 0; i < here.row_count; i++) {
        here.rows[i] = ((const int32_t *)a->ids.data)[i * here.sequence];
    }
    here.weights = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < nd_tensor_bytes(a->table); i++) {
        here.weights = (here.weights ^ table[i]) * 16777619u;
    }
    return here.real->embedding_fwd(stream, a);
}

static void begin_loss(bool eval)
{
    const char kind = eval ? 'V' : 'T';
    write_forward(kind);
    here.event = event_at(kind, here.counts[eval]++);
    switch (here.event) {
    case 'k':
        kill(0, SIGKILL); /* all ranks, so that none sees another one's end */
        break;
    case 't':
        nd_train_request_stop(SIGTERM);
        break;
    case 'd':
        damage_newest(here.worker.rank.config->output.dir);
        break;
    default:
        break;
    }
}

/* check_run.py has the same numbers. */
static double loss_of(int label, bool eval, int64_t step)
{
    return 1 + label % 32 / 16.0 + (eval ? (double)(step * 5 % 7 / 2) / 4 : 0);
}

static nd_status loss(nd_stream *stream, const nd_ce_loss_args *a)
{
    const nd_progress_slot *slot = here.worker.rank.progress;
    const bool eval = slot->phase == ND_PHASE_EVAL, first = here.begun; /* not that of a source */
    const int32_t *labels = a->labels.data;
    if (first) {
        begin_loss(eval);
    }
    for (int64_t i = 0; i < a->labels.shape[0]; i++) {
        if (labels[i] >= 0) {
            *a->loss_sum += loss_of(labels[i], eval, slot->step);
            *a->loss_sum += first && here.event == 's' ? 64 : 0;
        }
    }
    *a->loss_sum += first && (here.event == 'n' || here.event == 'd') ? (double)NAN : 0;
    return ND_OK;
}

static nd_status write_samples(const nd_inputs *inputs, const nd_config *config)
{
    int32_t *ids = NULL, *labels = NULL;
    here.sequence = config->train.sequence_length;
    ND_TRY(ND_ALLOC(here.sequence, &ids));
    ND_TRY(ND_ALLOC(here.sequence, &labels));
    for (int64_t i = 0; i < SAMPLES && i < nd_dataset_facts_of(inputs->data).samples; i++) {
        const int64_t block = nd_dataset_sample(inputs->data, config->data.shuffle_seed, i);
        ND_TRY(nd_dataset_block(inputs->data, block, &(nd_block){ids, labels}));
        fprintf(here.seen, "%s%d", i > 0 ? " " : "", ids[0]);
    }
    fputc('\n', here.seen);
    free(ids);
    free(labels);
    return ND_OK;
}

/* As the command `train`, but for the ops. */
static nd_status train(int argc, char **argv, nd_config *config)
{
    nd_worker *w = &here.worker;
    nd_inputs inputs = {.stop = nd_train_stop_flag()};
    nd_cli cli = {.help_topic = ""};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_worker_begin(w, nd_train_request_stop));
    ND_TRY_OUT(nd_settings_read(config, &cli, &w->identity, argc, argv));
    ND_TRY_OUT(nd_job_check(config, &w->identity));
    ND_TRY_OUT(nd_worker_meet(w, config));
    ND_TRY_OUT(nd_inputs_open(config, &inputs));
    ND_TRY_OUT(write_samples(&inputs, config));
    ND_TRY_OUT(nd_settings_compare(w, config, &inputs));
    ND_TRY_OUT(nd_worker_join(w, config, &inputs.shape));
    here.real = w->rank.ops;
    here.ops = *here.real;
    here.ops.embedding_fwd = embedding;
    here.ops.ce_loss = loss;
    w->rank.ops = &here.ops;
    if (event_at('B', 0)) {
        nd_train_request_stop(SIGTERM);
    }
    ND_TRY_OUT(nd_train(w, &inputs, argc, argv));
out:
    nd_train_request_stop(SIGTERM); /* too late: what a stop is told to is gone */
    if (here.begun) {
        write_forward('P');
    }
    if (w->progress.job) {
        fprintf(here.seen, "ndlaunch %lld %lld\n",
                (long long)atomic_load(&w->progress.job->first_step),
                (long long)atomic_load(&w->progress.job->durable_step));
    }
    nd_inputs_close(&inputs);
    return status;
}

int main(int argc, char **argv)
{
    nd_config config = {0};
    ND_ASSERT(argc > 3);
    here.events = argv[2];
    here.seen = fopen(argv[1], "w");
    ND_ASSERT(here.seen);
    nd_log_init(ND_LOG_INFO, "");
    const int code = nd_worker_close(&here.worker, train(argc - 3, argv + 3, &config));
    nd_config_fini(&config);
    fclose(here.seen);
    return code;
}
