// SPDX-License-Identifier: Apache-2.0
/* The ranks, the model and the tokenizer of a command that uses a model. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/process.h"
#include "runtime/device/host_memory.h"
#include "trainer/checkpoint/manifest_names.h"
#include "trainer/commands/generate.h"

enum { WORD_SECONDS = 10 };

/*
 * A stop signal ends a worker that is a job by itself at once. Nothing is lost then: what is
 * complete has been printed. Only a row that is being printed is completed first, unless a second
 * signal comes. The workers of a larger job end together before the next call of the model, and
 * ndlaunch ends those that are within a long one.
 */
static volatile sig_atomic_t stop_signal, is_alone, prints_row;

static void on_signal(int signal_number)
{
    static const char text[] = "error: stopped by a signal\n";
    const bool waits = !is_alone || (prints_row && !stop_signal);
    stop_signal = signal_number;
    if (!waits) {
        ssize_t ignored = write(STDERR_FILENO, text, sizeof text - 1);
        (void)ignored;
        _exit(ND_ERR_PREEMPTED);
    }
}

void nd_session_row_begin(void)
{
    prints_row = 1;
}

void nd_session_row_end(void)
{
    prints_row = 0;
    if (stop_signal) {
        on_signal(stop_signal);
    }
}

nd_status nd_print_row(json_t *row)
{
    char *text = row ? nd_json_text(row, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(row);
    if (!text) {
        return nd_fail_memory("a row of the output");
    }
    nd_session_row_begin();
    puts(text);
    free(text);
    nd_status status = nd_process_flush_output();
    nd_session_row_end();
    return status;
}

nd_status nd_session_begin(nd_worker *worker)
{
    ND_TRY(nd_job_begin(worker, on_signal));
    is_alone = worker->identity.world_size == 1;
    return ND_OK;
}

bool nd_session_word_is_due(nd_session *s)
{
    const double now = nd_clock_seconds();
    if (s->worker->rank.rank > 0 || now < s->next_word) {
        return false;
    }
    s->next_word = now + WORD_SECONDS;
    return true;
}

int nd_session_signal(void)
{
    return stop_signal;
}

nd_status nd_session_ask_stop(nd_session *s, nd_group_kind group, bool *stop)
{
    nd_rank *r = &s->worker->rank;
    int64_t any = stop_signal;
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[group], &r->stream, &any, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    *stop = any != 0;
    return ND_OK;
}

nd_status nd_session_end_wave(nd_session *s, nd_status status)
{
    nd_rank *r = &s->worker->rank;
    int64_t any = status == ND_ERR_PREEMPTED;
    if (r->mesh.size[ND_AXIS_DP_REPLICATE] == 1 || (status != ND_OK && any == 0)) {
        return status;
    }
    const nd_error own = *nd_error_last();
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &any, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    if (status != ND_OK) {
        return nd_fail(status, "%s", own.message);
    }
    return any == 0 ? ND_OK
                    : nd_fail(ND_ERR_PREEMPTED,
                              "stopped by a signal before all replicas had done their part");
}

static nd_status check_named(const char *model)
{
    return model ? ND_OK
                 : nd_fail(ND_ERR_CONFIG,
                           "--model is missing; it is a model's folder, a run folder, one of its "
                           "checkpoints, or ORG/NAME in the local cache");
}

static nd_status open_model(nd_session *s, const char *model, const char *tokenizer)
{
    ND_TRY(nd_model_files_open(model, &s->model));
    return nd_model_files_tokenizer(&s->model, tokenizer, &s->tokenizer_path, &s->tokenizer);
}

nd_status nd_session_ends(const nd_session *s, nd_ids *ends)
{
    const nd_model_files *m = &s->model;
    int32_t end = (int32_t)m->shape.eos_id;
    const size_t before = ends->count;
    ND_TRY(nd_ends_read(m->side, ends));
    if (ends->count > before || m->kind != ND_MODEL_CHECKPOINT) {
        return ND_OK;
    }
    if (end < 0 && s->tokenizer_path) {
        end = nd_corpus_model_end(s->tokenizer, s->tokenizer_path, m->shape.vocab);
    }
    ND_TRY(end >= 0 && end < m->shape.vocab ? nd_ids_add(ends, &end, 1) : ND_OK);
    return nd_ids_add(ends, m->shape.more_ends, (size_t)m->shape.more_end_count);
}

/* A checkpoint has its own checksums, which are compared as it is loaded. */
static nd_status verify_model(const nd_session *s)
{
    return s->model.kind == ND_MODEL_FOLDER ? nd_inputs_verify_folder(s->config, s->model.folder)
                                            : ND_OK;
}

nd_status nd_session_check(const nd_command_call *call, const char *model, const char *tokenizer,
                           nd_session_check_use *check_use, const void *context)
{
    const nd_config *config = call->config;
    nd_session s = {.config = config, .worker = call->worker, .checks = true};
    nd_status status = ND_OK;
    ND_TRY_OUT(check_named(model));
    ND_TRY_OUT(open_model(&s, model, tokenizer));
    ND_TRY_OUT(verify_model(&s));
    ND_TRY_OUT(nd_trainer_check_precision(config, &s.model.shape));
    ND_TRY_OUT(check_use(&s, context));
    ND_TRY_OUT(nd_job_check_room(call));
out:
    call->worker->rank.config = config;
    nd_session_close(&s);
    return status;
}

nd_status nd_session_open(nd_session *s, const nd_command_call *call, const char *model,
                          const char *tokenizer)
{
    const nd_config *config = call->config;
    const nd_identity *id = &call->worker->identity;
    *s = (nd_session){
        .config = config, .worker = call->worker, .next_word = nd_clock_seconds() + WORD_SECONDS};
    ND_TRY(check_named(model));
    ND_TRY(nd_job_check(config, id));
    ND_TRY(nd_worker_meet(s->worker, config));
    ND_TRY(open_model(s, model, tokenizer));
    if (id->source != ND_IDENTITY_NDLAUNCH && id->local_rank == 0) {
        ND_TRY(verify_model(s)); /* ndlaunch's check has done it */
    }
    if (s->tokenizer && nd_tokenizer_vocab_size(s->tokenizer) > s->model.shape.vocab) {
        nd_log_warning("the tokenizer has ids up to %d, but the model's vocab_size is %lld; a text "
                       "with such a token is an error",
                       nd_tokenizer_vocab_size(s->tokenizer) - 1, (long long)s->model.shape.vocab);
    }
    return nd_worker_join(s->worker, config, &s->model.shape);
}

void nd_session_close(nd_session *s)
{
    nd_tokenizer_close(s->tokenizer);
    free(s->tokenizer_path);
    nd_model_files_close(&s->model);
}

nd_status nd_session_agree_status(nd_session *s, nd_status status, const char *what)
{
    nd_rank *r = &s->worker->rank;
    const nd_error own = *nd_error_last();
    int64_t worst = status;
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &worst, 1,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    if (status != ND_OK) {
        return nd_fail((nd_status)worst, "%s", own.message);
    }
    return worst == ND_OK ? ND_OK
                          : nd_fail_elsewhere((nd_status)worst, "another rank could not %s", what);
}

/* Bytes of one collective: of a broadcast, and of an all-reduce of a GPU's host memory. */
enum { SHARE_BYTES = 1 << 20, REDUCE_WORDS = 512 };

/* NCCL has broadcasts of device memory alone. So the bytes are a sum, to which others add 0. */
static nd_status share_by_sums(nd_rank *r, nd_comm *comm, char *data, int64_t bytes, bool own)
{
    int64_t words[REDUCE_WORDS];
    for (int64_t at = 0; at < bytes; at += (int64_t)sizeof words) {
        const size_t left = (size_t)(bytes - at), n = left < sizeof words ? left : sizeof words;
        memset(words, 0, sizeof words);
        if (own) {
            memcpy(words, data + at, n);
        }
        ND_TRY(nd_comm_all_reduce(comm, &r->stream, words, nd_ceil_div((int64_t)n, 8), ND_DTYPE_I64,
                                  ND_REDOP_SUM, NULL));
        memcpy(data + at, words, n);
    }
    return ND_OK;
}

nd_status nd_session_broadcast(nd_session *s, nd_group_kind group, void *data, int64_t bytes,
                               int root, bool own)
{
    nd_rank *r = &s->worker->rank;
    nd_comm *comm = r->groups.by_kind[group];
    if (nd_rank_is_gpu(r)) {
        return share_by_sums(r, comm, data, bytes, own);
    }
    for (int64_t at = 0; at < bytes; at += SHARE_BYTES) {
        ND_TRY(nd_comm_broadcast(comm, &r->stream, (char *)data + at,
                                 nd_min(bytes - at, SHARE_BYTES), ND_DTYPE_U8, root, NULL));
    }
    return ND_OK;
}

nd_status nd_session_share(nd_session *s, nd_status read, char **text, size_t *size)
{
    nd_rank *r = &s->worker->rank;
    nd_comm *world = r->groups.by_kind[ND_GROUP_WORLD];
    int64_t bytes = r->rank == 0 && read == ND_OK ? (int64_t)*size : 0;
    ND_TRY(nd_session_agree_status(s, r->rank == 0 ? read : ND_OK, "read the input"));
    ND_TRY(nd_comm_all_reduce(world, &r->stream, &bytes, 1, ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    nd_status status = ND_OK;
    if (r->rank > 0) {
        *text = NULL;
        *size = (size_t)bytes;
        status = ND_ALLOC(bytes + 1, text);
    }
    ND_TRY(nd_session_agree_status(s, status, "hold the input"));
    return nd_session_broadcast(s, ND_GROUP_WORLD, *text, bytes, 0, r->rank == 0);
}

/* Settings, command line and all numbers of the model, for the comparison of ranks. */
static nd_status job_text(const nd_session *s, const nd_command_call *call, char **out)
{
    char *settings = NULL, hex[65] = "";
    size_t size;
    nd_status status = ND_OK;
    ND_TRY(nd_config_job_text(s->config, &settings));
    FILE *text = open_memstream(out, &size);
    if (text) {
        fputs(settings, text);
        for (int i = 1; i < call->argc && status == ND_OK; i++) {
            const char *word = call->argv[i];
            const bool is_long = strlen(word) > 1000; /* a prompt */
            status = is_long ? nd_sha256(word, strlen(word), hex) : ND_OK;
            fprintf(text, "argument %d=%s\n", i, is_long ? hex : word);
        }
        nd_shape_print(&s->model.shape, text);
    }
    free(settings);
    return !text || fclose(text) != 0 ? nd_fail_memory("the command line") : status;
}

nd_status nd_session_agree(nd_session *s, const nd_command_call *call)
{
    char *text = NULL;
    if (s->worker->rank.world_size == 1) {
        return ND_OK;
    }
    nd_status status = job_text(s, call, &text);
    status = status == ND_OK ? nd_settings_compare_text(s->worker, text) : status;
    free(text);
    return status;
}

nd_status nd_session_check_memory(const nd_session *s, const nd_memplan *plan)
{
    const nd_host_memory host = nd_host_memory_read("");
    const int workers = s->worker->identity.local_world_size;
    const double bytes = (double)plan->total;
    if (s->worker->device->kind != ND_DEVICE_CPU) {
        return ND_OK;
    }
    if (host.physical > 0 && bytes * workers > (double)host.physical) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%d worker%s of this host with a plan of %.2f GiB each need more than its "
                       "%.1f GiB of memory; use shorter texts, or fewer at once (--max-batch, "
                       "--context, --sequence-length), or a smaller model",
                       workers, workers == 1 ? "" : "s", bytes * 0x1p-30,
                       (double)host.physical * 0x1p-30);
    }
    return nd_limits_check_memory((int64_t)plan->total + ND_WORKER_LIBRARY_BYTES,
                                  "a worker with this model");
}

nd_status nd_session_check_single(const nd_mesh *mesh, const char *what)
{
    const int replicas = mesh->size[ND_AXIS_DP_REPLICATE];
    return replicas == 1
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "mesh.dp_replicate is %d, but %s at a time; use fewer workers, or "
                         "--tp-size",
                         replicas, what);
}

/* What the sentence of a plan that does not fit advises is for training. */
static nd_status commit(const nd_session *s, nd_generator *g)
{
    const nd_status status = nd_generator_commit(g);
    return status == ND_ERR_RESOURCE && s->worker->device->kind != ND_DEVICE_CPU
               ? nd_fail_context(status,
                                 "shorter texts, or fewer at once (--max-batch, --context), "
                                 "need less memory for keys and values")
               : status;
}

nd_status nd_session_generator(nd_session *s, const nd_generate_options *options,
                               nd_generator **out)
{
    nd_generator *g = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_trainer_check_precision(s->config, &s->model.shape));
    ND_TRY(nd_generator_create(&s->worker->rank, options, &g));
    ND_TRY_OUT(nd_session_check_memory(s, nd_generator_plan(g)));
    ND_TRY_OUT(commit(s, g));
    ND_TRY_OUT(nd_model_files_load(&s->model, nd_generator_fsdp(g)));
    *out = g;
    g = NULL;
out:
    nd_generator_destroy(g);
    return status;
}
