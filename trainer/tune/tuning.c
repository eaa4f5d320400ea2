// SPDX-License-Identifier: Apache-2.0
/* Rank 0 makes the choices, and all ranks take the same ones. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/tune/measure.h"

enum { RECORD_MAX_BYTES = 64 << 20 };

void nd_tuning_destroy(nd_tuning *t)
{
    if (t) {
        free(t->from);
        free(t->choices);
        free(t->json);
        free(t);
    }
}

static const char *replayed(const nd_config *config)
{
    const char *from = config->kernels.autotune_from;
    return from && from[0] ? from : NULL;
}

static nd_status read_file(const nd_config *config, const nd_shape *shape, nd_tuning **out)
{
    const char *path = replayed(config);
    char *text = NULL, *from = strdup(path);
    size_t bytes = 0;
    nd_filter filter = {0};
    nd_tuning *t = NULL;
    nd_status status = from ? ND_OK : nd_fail_memory("kernels.autotune_from");
    ND_TRY_OUT(status);
    status = nd_fs_read(path, RECORD_MAX_BYTES, ND_ERR_DATA, &text, &bytes);
    if (status != ND_OK) {
        (void)nd_fail_context(status, "reading kernels.autotune_from");
        goto out;
    }
    ND_TRY_OUT(nd_record_read(text, bytes, path, config, shape, &t));
    ND_TRY_OUT(nd_filter_init(&filter, config, shape));
    ND_TRY_OUT(nd_filter_choose(&filter, &t->linear_choice));
    t->from = from;
    from = NULL;
    *out = t;
    t = NULL;
out:
    nd_tuning_destroy(t);
    nd_filter_fini(&filter);
    free(text);
    free(from);
    return status;
}

nd_status nd_tuning_check(const nd_config *config, const nd_shape *shape, bool gpu, nd_tuning **out)
{
    *out = NULL;
    if (!config->kernels.autotune && !replayed(config)) {
        return ND_OK;
    }
    if (!gpu) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s, but autotune chooses among algorithms of cuBLASLt, and this run "
                       "computes on CPUs, which have none; leave the key out, or use --device cuda",
                       replayed(config) ? "kernels.autotune_from is given"
                                        : "kernels.autotune is true");
    }
    return replayed(config) ? read_file(config, shape, out) : ND_OK;
}

/* Seconds for timing. Meanwhile the other ranks wait in a collective, whose deadline must not pass:
 * timing takes a third of it. The rest is for what is not timed here, as the last call that the
 * budget lets begin, the choice of algorithms, and ranks that are slow to arrive. The division of
 * the GPU, in which all take part, has as much again. */
static double budget_of(const nd_rank *rank)
{
    const double most = 60.0;
    return rank->world_size == 1 ? most : fmin(most, rank->transport->timeout_seconds / 3.0);
}

/* Rank 0: makes {"autotune": {...}}, owned by the caller. */
static nd_status make_text(nd_rank *rank, const nd_tuned_division *division, char **out)
{
    nd_tuning *t = NULL;
    const nd_config *config = rank->config;
    nd_status status = ND_OK;
    ND_TRY(nd_tuning_check(config, &rank->shape, nd_rank_is_gpu(rank), &t));
    if (!t) {
        size_t version;
        int capability;
        ND_TRY(ND_ALLOC(1, &t));
        nd_ops_cuda_versions(rank->device, &capability, &version);
        snprintf(t->gpu, sizeof t->gpu, "%s", rank->device->name);
        t->capability = capability;
        t->cublaslt = (int64_t)version;
        t->division = *division;
        ND_TRY_OUT(nd_divide_products(rank, division));
        ND_TRY_OUT(nd_measure(rank, budget_of(rank), t));
        t->seconds += division->seconds;
        for (int i = 0; i < division->pair_count; i++) {
            t->cut_short |= division->pairs[i].seconds < 0.0;
        }
    }
    ND_TRY_OUT(nd_record_write(t, config, &rank->shape));
    status = nd_fs_format(out, "{\"autotune\": %s}", t->json);
out:
    nd_tuning_destroy(t);
    return status;
}

/* Sends the text of rank 0 to all, through device memory; `bytes` counts the NUL. */
static nd_status broadcast(nd_rank *rank, char *text, int64_t bytes)
{
    nd_stream *stream = &rank->stream;
    void *buffer = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_device_alloc(rank->device, (size_t)bytes, &buffer));
    if (rank->rank == 0) {
        ND_TRY_OUT(nd_copy(stream, buffer, text, (size_t)bytes));
    }
    ND_TRY_OUT(nd_comm_broadcast(rank->groups.by_kind[ND_GROUP_WORLD], stream, buffer, bytes,
                                 ND_DTYPE_U8, 0, NULL));
    ND_TRY_OUT(nd_copy(stream, text, buffer, (size_t)bytes));
    ND_TRY_OUT(nd_stream_sync(stream));
    text[bytes - 1] = '\0';
out:
    nd_device_free(rank->device, buffer, (size_t)bytes);
    return status;
}

static nd_status reduce(nd_rank *rank, int64_t *values, int64_t count)
{
    return nd_comm_all_reduce(rank->groups.by_kind[ND_GROUP_WORLD], &rank->stream, values, count,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL);
}

/* Gives all ranks the choices of rank 0 as text, owned by the caller. */
static nd_status share(nd_rank *rank, const nd_tuned_division *division, char **out)
{
    char *text = NULL, message[ND_ERROR_MESSAGE_MAX] = "";
    nd_status made = rank->rank == 0 ? make_text(rank, division, &text) : ND_OK, status = ND_OK;
    if (made != ND_OK) {
        snprintf(message, sizeof message, "%s", nd_error_last()->message);
    }
    int64_t values[2] = {text ? (int64_t)strlen(text) + 1 : 0, (int64_t)made};
    ND_TRY_OUT(reduce(rank, values, 2));
    if (made != ND_OK) {
        status = nd_fail(made, "%s", message);
        goto out;
    }
    if (values[1] != ND_OK) {
        status = nd_fail_elsewhere((nd_status)values[1],
                                   "autotune failed on rank 0; see the message of rank 0");
        goto out;
    }
    if (rank->rank > 0) {
        ND_TRY_OUT(ND_ALLOC(values[0], &text));
    }
    ND_TRY_OUT(broadcast(rank, text, values[0]));
    *out = text;
    text = NULL;
out:
    free(text);
    return status;
}

/* ND_ERR_CONFIG unless this rank's GPU and library are those that the choices were made for. */
static nd_status check_machine(const nd_rank *rank, const nd_tuning *t)
{
    size_t version;
    int capability;
    char owner[300] = "rank 0";
    nd_ops_cuda_versions(rank->device, &capability, &version);
    if (t->from) {
        snprintf(owner, sizeof owner, "%s", t->from);
    }
    const char *advice = t->from
                             ? "choose again with kernels.autotune, without kernels.autotune_from"
                             : "use equal GPUs, or leave kernels.autotune out";
    if (strcmp(t->gpu, rank->device->name) != 0 || t->capability != capability) {
        return nd_fail(ND_ERR_CONFIG,
                       "the choices of autotune of %s are for gpu \"%s\" of compute capability "
                       "%lld, and rank %d has \"%s\" of %d; %s",
                       owner, t->gpu, (long long)t->capability, rank->rank, rank->device->name,
                       capability, advice);
    }
    if (t->cublaslt != (int64_t)version) {
        return nd_fail(ND_ERR_CONFIG,
                       "the choices of autotune of %s are for cublaslt %lld, and rank %d has %zu; "
                       "%s",
                       owner, (long long)t->cublaslt, rank->rank, version, advice);
    }
    return ND_OK;
}

static nd_status install(nd_rank *rank, const char *text, nd_tuning **out)
{
    const char *path = replayed(rank->config);
    nd_tuning *t = NULL;
    nd_status status = ND_OK;
    ND_TRY(
        nd_record_read(text, strlen(text), "autotune of rank 0", rank->config, &rank->shape, &t));
    if (path) {
        ND_TRY_OUT(nd_fs_format(&t->from, "%s", path));
    }
    ND_TRY_OUT(check_machine(rank, t));
    ND_TRY_OUT(nd_record_write(t, rank->config, &rank->shape));
    ND_TRY_OUT(nd_divide_products(rank, &t->division));
    ND_TRY_OUT(nd_ops_cuda_install(rank->device, t->choices, t->choice_count));
    *out = t;
    t = NULL;
out:
    nd_tuning_destroy(t);
    return status;
}

static uint64_t digest(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    }
    return hash;
}

/* 62 bits of a hash of what this rank has installed. */
static int64_t digest_of(const nd_tuning *t)
{
    uint64_t hash = 14695981039346656037u;
    hash = digest(hash, &t->linear_choice, sizeof t->linear_choice);
    hash = digest(hash, &t->division.comm_blocks, sizeof t->division.comm_blocks);
    hash = digest(hash, &t->division.product_processors, sizeof t->division.product_processors);
    hash = digest(hash, t->choices, (size_t)t->choice_count * sizeof *t->choices);
    return (int64_t)(hash >> 2);
}

/* Either all ranks have the same choices, or all fail; the first that failed gives the reason. */
static nd_status agree(nd_rank *rank, nd_status status, const nd_tuning *t)
{
    char message[ND_ERROR_MESSAGE_MAX] = "";
    int64_t own = status == ND_OK ? digest_of(t) : 0;
    int64_t first = status == ND_OK ? 0 : rank->world_size - rank->rank;
    int64_t values[3] = {first, own, -own};
    if (status != ND_OK) {
        snprintf(message, sizeof message, "%s", nd_error_last()->message);
    }
    ND_TRY(reduce(rank, values, 3));
    if (values[0] > 0 && values[0] == first) {
        return nd_fail(status, "%s", message);
    }
    if (values[0] > 0) {
        long long first_rank = (long long)rank->world_size - (long long)values[0];
        return nd_fail_elsewhere(ND_ERR_CONFIG,
                                 "rank %lld cannot use the choices of autotune; see the message of "
                                 "rank %lld",
                                 first_rank, first_rank);
    }
    if (values[1] != own || values[2] != -own) {
        return nd_fail(ND_ERR_INTERNAL, "ranks have different choices of autotune");
    }
    return ND_OK;
}

nd_status nd_tuning_make(nd_rank *rank, nd_tuning **out)
{
    char *text = NULL;
    nd_tuning *t = NULL;
    nd_tuned_division division = {0};
    *out = NULL;
    if (!rank->config->kernels.autotune && !replayed(rank->config)) {
        return ND_OK;
    }
    if (!replayed(rank->config) && nd_rank_is_gpu(rank)) { /* else share() says what is wrong */
        ND_TRY(nd_divide(rank, budget_of(rank), &division));
    }
    ND_TRY(share(rank, &division, &text));
    nd_status status = install(rank, text, &t);
    free(text);
    status = agree(rank, status, t);
    status = status == ND_OK ? nd_divide_collectives(rank, &t->division) : status;
    if (status != ND_OK) {
        nd_tuning_destroy(t);
        return status;
    }
    *out = t;
    return ND_OK;
}

void nd_tuning_warn(const nd_rank *rank, const nd_tuning *tuning)
{
    int unchosen = tuning ? nd_ops_cuda_unchosen(rank->device) : 0;
    if (unchosen > 0 && rank->rank == 0) {
        nd_log_warning("autotune: %d forms of products were not among its choices; cuBLASLt's "
                       "first algorithm made them",
                       unchosen);
    }
}
