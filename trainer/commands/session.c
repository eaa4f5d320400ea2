// SPDX-License-Identifier: Apache-2.0
/* The ranks, the model and the tokenizer of a command that uses a model, and what rank 0 reads. */
#include "trainer/commands/session.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/device/host_memory.h"

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

nd_status nd_print_line(const char *text, size_t size)
{
    prints_row = 1;
    fwrite(text, 1, size, stdout);
    putchar('\n');
    nd_status status = nd_process_flush_output();
    prints_row = 0;
    if (stop_signal) {
        on_signal(stop_signal);
    }
    return status;
}

nd_status nd_print_row(json_t *row)
{
    char *text = row ? nd_json_text(row, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(row);
    nd_status status =
        text ? nd_print_line(text, strlen(text)) : nd_fail_memory("a row of the output");
    free(text);
    return status;
}

nd_status nd_session_begin(nd_worker *worker)
{
    ND_TRY(nd_worker_begin(worker, on_signal));
    is_alone = worker->identity.world_size == 1;
    return ND_OK;
}

bool nd_session_is_stopped(void)
{
    return stop_signal != 0;
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

/* Ranks. */

nd_status nd_session_ask_stop(nd_session *s, nd_group_kind group, bool *stop)
{
    int64_t any = stop_signal;
    ND_TRY(nd_all_reduce(&s->worker->rank, group, &any, 1, ND_DTYPE_I64, ND_REDOP_MAX));
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
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, &any, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    if (status != ND_OK) {
        return nd_fail(status, "%s", own.message);
    }
    return any == 0 ? ND_OK
                    : nd_fail(ND_ERR_PREEMPTED,
                              "stopped by a signal before all replicas had done their part");
}

nd_status nd_session_share(nd_session *s, nd_status read, char **text, size_t *size)
{
    nd_rank *r = &s->worker->rank;
    const bool first = r->rank == 0;
    if (s->checks) {
        return read;
    }
    int64_t values[2] = {0, first && read == ND_OK ? (int64_t)*size : 0};
    ND_TRY(nd_shared_agree_on(r, first ? read : ND_OK, "the input", values, 2));
    if (!first) {
        *size = (size_t)values[1];
        ND_TRY(ND_ALLOC(*size + 1, text));
    }
    return nd_shared_bytes(r, ND_GROUP_WORLD, *text, values[1], first);
}

/* Compares settings, command line and all numbers of the model. */
nd_status nd_session_agree(nd_session *s)
{
    char *text = NULL, *settings = NULL, hex[65] = "";
    size_t size;
    nd_status status = ND_OK;
    if (s->checks || s->worker->rank.world_size == 1) {
        return ND_OK;
    }
    ND_TRY(nd_config_job_text(&s->config, &settings));
    FILE *out = open_memstream(&text, &size);
    if (out) {
        fputs(settings, out);
        for (int i = 1; i < s->call->argc && status == ND_OK; i++) {
            const char *word = s->call->argv[i];
            const bool is_long = strlen(word) > 1000; /* a prompt */
            status = is_long ? nd_sha256(word, strlen(word), hex) : ND_OK;
            fprintf(out, "argument %d=%s\n", i, is_long ? hex : word);
        }
        nd_shape_print(&s->model.shape, out);
    }
    status = !out || fclose(out) != 0 ? nd_fail_memory("the command line") : status;
    status = status == ND_OK ? nd_settings_compare_text(s->worker, text) : status;
    free(settings);
    free(text);
    return status;
}

nd_status nd_session_check_single(const nd_session *s, const char *what)
{
    const int replicas = s->config.resolved_mesh.size[ND_AXIS_DP_REPLICATE];
    ND_REFUSE(replicas > 1,
              "mesh.dp_replicate is %d, but %s at a time; use fewer workers, or --tp-size",
              replicas, what);
    return ND_OK;
}

nd_status nd_session_run(const nd_command_call *call)
{
    const nd_command *command = call->use;
    nd_session s = {.call = call,
                    .flags = call->line->values,
                    .config = *call->config,
                    .worker = call->worker,
                    .next_word = nd_clock_seconds() + WORD_SECONDS,
                    .checks = call->checks};
    const nd_identity *id = &s.worker->identity;
    /* ndlaunch's check verifies for all of its workers. */
    const bool verifies = s.checks || (id->source != ND_IDENTITY_NDLAUNCH && id->local_rank == 0);
    nd_status status = ND_OK;
    ND_REFUSE(!s.flags[command->model].text,
              "--model is missing; it is a model's folder, a GGUF file, a run folder, one of its "
              "checkpoints, or ORG/NAME in the local cache");
    if (!s.checks) {
        ND_TRY_OUT(nd_job_check(&s.config, id));
        ND_TRY_OUT(nd_worker_meet(s.worker, &s.config));
    }
    ND_TRY_OUT(nd_model_files_open(s.flags[command->model].text, &s.model));
    ND_TRY_OUT(nd_model_files_tokenizer(&s.model, s.flags[command->tokenizer].text,
                                        &s.tokenizer_path, &s.tokenizer));
    /* A checkpoint has its own checksums, which are compared as it is loaded. */
    if (s.model.kind == ND_MODEL_FOLDER && verifies) {
        ND_TRY_OUT(nd_inputs_verify_folder(&s.config, s.model.folder));
    }
    ND_TRY_OUT(nd_trainer_check_precision(&s.config, &s.model.shape));
    if (s.checks) {
        ND_TRY_OUT(command->use(&s));
        status = nd_job_check_room(call);
        goto out;
    }
    if (s.tokenizer && nd_tokenizer_vocab_size(s.tokenizer) > s.model.shape.vocab) {
        nd_log_warning("the tokenizer has ids up to %d, but the model's vocab_size is %lld; a text "
                       "with such a token is an error",
                       nd_tokenizer_vocab_size(s.tokenizer) - 1, (long long)s.model.shape.vocab);
    }
    ND_TRY_OUT(nd_worker_join(s.worker, &s.config, &s.model.shape));
    status = command->use(&s);
out:
    call->worker->rank.config = call->config;
    nd_tokenizer_close(s.tokenizer);
    free(s.tokenizer_path);
    nd_model_files_close(&s.model);
    return status;
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

int32_t nd_session_beginning(nd_encoder *encoder)
{
    const int32_t *ids;
    size_t count;
    return nd_encode(encoder, "", 0, &ids, &count) == ND_OK && count > 0 ? ids[0] : -1;
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
                       workers, workers == 1 ? "" : "s", bytes / nd_gib,
                       (double)host.physical / nd_gib);
    }
    return nd_limits_check_memory((int64_t)plan->total + ND_WORKER_LIBRARY_BYTES,
                                  "a worker with this model");
}

nd_status nd_session_generator(nd_session *s, const nd_generate_options *options,
                               nd_generator **out)
{
    nd_generator *g = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_generator_create(&s->worker->rank, options, &g));
    ND_TRY_OUT(nd_session_check_memory(s, &g->plan));
    status = nd_generator_commit(g);
    if (status == ND_ERR_RESOURCE && s->worker->device->kind != ND_DEVICE_CPU) {
        /* The sentence of a plan that does not fit has advice for training. */
        nd_fail_context(status, "shorter texts, or fewer at once (--max-batch, --context), need "
                                "less memory for keys and values");
    }
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_model_files_load(&s->model, &g->model->fsdp));
    *out = g;
    g = NULL;
out:
    nd_generator_destroy(g);
    return status;
}

/*
 * Standard input of rank 0. The other ranks wait for it in small steps, so that they see a stop
 * signal, and so that no collective outlasts its deadline while a user thinks.
 */

enum { PIECE = 1 << 16, WAIT_MS = 500 };

/* Input that rank 0 has read and nobody has taken yet; empty on other ranks. */
typedef struct stdin_state {
    nd_bytes bytes;  /* owned */
    bool ended, any; /* any: on all ranks, whether rank 0 had bytes at the end of the last wait */
} stdin_state;

/* Returns whether all input is there or (line) a whole line. */
static bool is_ready(const stdin_state *in, bool line)
{
    return in->ended ||
           (line && in->bytes.count > 0 && memchr(in->bytes.data, '\n', in->bytes.count));
}

/* Reads until it is ready, for WAIT_MS at most. */
static nd_status read_for_a_while(stdin_state *in, bool line)
{
    const double end = nd_clock_seconds() + WAIT_MS * 1e-3;
    char piece[PIECE];
    while (!is_ready(in, line) && nd_clock_seconds() < end) {
        struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
        int events = poll(&p, 1, WAIT_MS);
        ssize_t n = events > 0 ? read(STDIN_FILENO, piece, sizeof piece) : -1;
        if (events == 0 || (n < 0 && errno == EINTR)) {
            return ND_OK;
        }
        if (n < 0) {
            return nd_fail(ND_ERR_IO, "cannot read standard input: %s", strerror(errno));
        }
        if (in->bytes.count + (size_t)n > ND_STDIN_BYTES_MAX) {
            return nd_fail(ND_ERR_DATA, "standard input has more than %d bytes; give it in parts",
                           ND_STDIN_BYTES_MAX);
        }
        in->ended = n == 0;
        ND_TRY(nd_bytes_add(&in->bytes, piece, (size_t)n));
    }
    return ND_OK;
}

/* Waits until rank 0 is ready. Collective over all ranks. ND_ERR_PREEMPTED: one of them got a stop
 * signal. */
static nd_status wait_for_input(stdin_state *in, nd_session *s, bool line)
{
    nd_rank *r = &s->worker->rank;
    const bool first = r->rank == 0;
    for (;;) {
        nd_status status = first ? read_for_a_while(in, line) : ND_OK;
        int64_t states[] = {0, first && is_ready(in, line), stop_signal, in->bytes.count > 0};
        ND_TRY(nd_shared_agree_on(r, status, "standard input", states, 4));
        if (states[2] != 0) {
            return nd_fail(ND_ERR_PREEMPTED, "stopped by a signal while it waited for input");
        }
        if (states[1] != 0) {
            in->any = states[3] != 0;
            return ND_OK;
        }
    }
}

/* All that was read, or (line) its first line, without the end. */
static nd_status take_part(stdin_state *in, bool line, char **text, size_t *size)
{
    const char *end = line ? memchr(in->bytes.data, '\n', in->bytes.count) : NULL;
    const size_t all = end ? (size_t)(end - (char *)in->bytes.data) + 1 : in->bytes.count;
    *size = all - (end != NULL);
    if (!end) {
        *text = (char *)in->bytes.data; /* NULL without any */
        in->bytes = (nd_bytes){0};
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(*size + 1, text));
    memcpy(*text, in->bytes.data, *size);
    memmove(in->bytes.data, in->bytes.data + all, in->bytes.count - all);
    in->bytes.count -= all;
    return ND_OK;
}

nd_status nd_stdin_each(nd_session *s, const char *prompt,
                        nd_status (*take)(void *context, const char *text, size_t size),
                        void *context)
{
    const bool first = s->worker->rank.rank == 0;
    stdin_state in = {0};
    nd_status status = ND_OK;
    do {
        char *text = NULL;
        size_t size = 0;
        if (first && prompt && isatty(STDIN_FILENO)) {
            fputs(prompt, stderr);
        }
        status = wait_for_input(&in, s, prompt);
        if (status == ND_OK && (in.any || !prompt)) {
            status = first ? take_part(&in, prompt, &text, &size) : ND_OK;
            status = nd_session_share(s, status, &text, &size);
            status = status == ND_OK ? take(context, text, size) : status;
        }
        free(text);
    } while (status == ND_OK && in.any && prompt);
    free(in.bytes.data);
    return status;
}
