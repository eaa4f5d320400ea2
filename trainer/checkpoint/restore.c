// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/saver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"
#include "runtime/rdzv/identity.h"
#include "trainer/weights/weights.h"

/* Bytes of host memory through which state goes to a GPU, and the least number of slices, so that a
 * small model goes the same way. */
enum { SLICE_BYTES = 64 << 20, SLICES_MIN = 4 };

typedef struct restore {
    nd_trainer *trainer;
    const nd_manifest *manifest;
    nd_source *source;
    int arrays;             /* that are loaded */
    nd_trainer_state state; /* live, on the device */
    /* The slice of the flat state arrays that is read: elements [begin, end). */
    int64_t begin, end;
    bool wanted;      /* this rank reads something of it */
    float *host;      /* GPU: (arrays, capacity); NULL: it is read straight to live */
    int64_t capacity; /* elements of a slice */
} restore;

static nd_status want_part(void *context, const nd_span *part)
{
    restore *r = context;
    r->wanted = true;
    for (int a = 0; a < r->arrays; a++) {
        float *to = r->host ? r->host + a * r->capacity + part->begin - r->begin
                            : r->state.shards[a] + part->begin;
        ND_TRY(nd_source_add(r->source, part, (nd_state_kind)a, to));
    }
    return ND_OK;
}

static nd_status want_span(void *context, const nd_span *span)
{
    const restore *r = context;
    return nd_shared_reads(r->trainer->rank, span->param)
               ? nd_span_each_part(span, r->begin, r->end, want_part, context)
               : ND_OK;
}

/* Reads the elements that this rank has to read. Those between them, padding and elements that
 * other ranks read, become 0 until these ranks pass them on. */
static nd_status read_slices(restore *r)
{
    const nd_layout *layout = r->trainer->model->layout;
    nd_stream *stream = &r->trainer->rank->stream;
    for (r->begin = 0; r->begin < layout->shard_total; r->begin = r->end) {
        r->end = r->begin + nd_min(r->capacity, layout->shard_total - r->begin);
        r->wanted = false;
        for (int u = 0; u < layout->unit_count; u++) {
            ND_TRY(
                nd_layout_each_span(layout, &layout->units[u], layout->shard_index, want_span, r));
        }
        ND_TRY(nd_source_run(r->source));
        for (int a = 0; a < r->arrays && r->host && r->wanted; a++) {
            float *from = r->host + a * r->capacity;
            const size_t bytes = (size_t)(r->end - r->begin) * sizeof *from;
            ND_TRY(nd_copy(stream, r->state.shards[a] + r->begin, from, bytes));
            ND_TRY(nd_stream_sync(stream));
            memset(from, 0, bytes);
        }
    }
    return ND_OK;
}

/* Rank 0 reads the manifest, and the files of the writer in which damage was found; without one
 * (-1) it looks at all files. ND_OK: it finds no damage. ND_ERR_DATA: it does. Another status: it
 * cannot tell. */
static nd_status read_again(const char *checkpoint, int64_t writer)
{
    nd_manifest manifest = {0};
    int64_t bytes = 0;
    nd_status status = nd_manifest_read(checkpoint, &manifest);
    if (status == ND_OK) {
        const bool one = writer >= 0 && writer < manifest.writer_count;
        status = nd_source_verify(checkpoint, &manifest, one ? (int)writer : -1, one, &bytes);
    }
    nd_manifest_fini(&manifest);
    return status;
}

/* Some rank found damage. It counts only when rank 0 finds it too: the rank's memory may be bad, or
 * its host may not see the run folder. `suspect`: nd_source_stats' of this rank. */
static nd_status confirm(nd_trainer *t, const char *folder, int64_t suspect)
{
    nd_rank *r = t->rank;
    const nd_error error = *nd_error_last();
    const bool own = error.cause != ND_CAUSE_ELSEWHERE;
    int64_t first = own ? r->world_size - r->rank : 0, found = 0;
    char host[128], reason[ND_ERROR_MESSAGE_MAX];
    nd_identity_host(host, sizeof host);
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, &first, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    first = r->world_size - first; /* the lowest rank that found damage */
    suspect = r->rank == first ? suspect : 0;
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, &suspect, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    if (r->rank == 0) {
        found = first > 0 ? read_again(folder, suspect - 1) : ND_ERR_DATA;
    }
    const nd_error again = *nd_error_last();
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, &found, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    if (found == ND_ERR_DATA) {
        return nd_shared_fail(own ? ND_ERR_DATA : ND_OK, ND_ERR_DATA, folder, error.message);
    }
    if (found == ND_OK) {
        snprintf(
            reason, sizeof reason,
            "rank %d on %s finds damage where rank 0 finds none, so the checkpoint stays; look "
            "at the memory and the file system of this host, which may not see the run "
            "folder: %.500s",
            r->rank, host, error.message);
        return nd_shared_fail(r->rank == first ? ND_ERR_IO : ND_OK, ND_ERR_IO, folder, reason);
    }
    snprintf(reason, sizeof reason,
             "rank %lld finds damage, and rank 0 on %s cannot read the files again to confirm it, "
             "so the checkpoint stays: %.500s",
             (long long)first, host, again.message);
    return nd_shared_fail(r->rank == 0 ? (nd_status)found : ND_OK, (nd_status)found, folder,
                          reason);
}

static int64_t slice_elements(const nd_layout *layout, int arrays)
{
    return nd_min(SLICE_BYTES / (int64_t)sizeof(float) / arrays,
                  nd_ceil_div(layout->shard_total, SLICES_MIN));
}

size_t nd_restore_host_bytes(const nd_layout *layout, int arrays)
{
    return (size_t)(slice_elements(layout, arrays) * arrays) * sizeof(float) + ND_CHUNK_BYTES;
}

/* FP8 scales. Those of another recipe, which begins with its own start values, are left out. */
static nd_status load_scales(restore *r, const nd_scale_state *scales, int *loaded)
{
    nd_stream *stream = &r->trainer->rank->stream;
    for (int i = 0; i < r->manifest->extra_count; i++) {
        const nd_state_extra *stored = &r->manifest->extras[i];
        if (strcmp(stored->name, scales->name) != 0 || stored->count != scales->count) {
            continue;
        }
        float *host = NULL;
        size_t bytes = (size_t)scales->count * sizeof *host;
        ND_TRY(ND_ALLOC(scales->count, &host));
        nd_status status = nd_source_add_extra(r->source, scales->name, scales->count, host);
        status = status == ND_OK ? nd_source_run(r->source) : status;
        status = status == ND_OK ? nd_copy(stream, scales->data, host, bytes) : status;
        status = status == ND_OK ? nd_stream_sync(stream) : status;
        free(host);
        ND_TRY(status);
        ++*loaded;
    }
    return ND_OK;
}

static nd_status read_checkpoint(restore *r, const char *folder, nd_manifest *manifest, bool verify,
                                 nd_restored *out)
{
    int loaded = 0;
    ND_TRY(nd_manifest_read(folder, manifest));
    ND_TRY(nd_source_open(folder, manifest, verify, &r->source));
    r->manifest = manifest;
    out->leaves = r->arrays < manifest->arrays;
    r->arrays = (int)nd_min(r->arrays, manifest->arrays);
    ND_TRY(read_slices(r));
    for (int i = 0; i < r->state.scale_count; i++) {
        ND_TRY(load_scales(r, &r->state.scales[i], &loaded));
    }
    out->scales = loaded == r->state.scale_count;
    out->scales_differ = loaded < manifest->extra_count;
    return ND_OK;
}

nd_status nd_restore_checkpoint(nd_trainer *trainer, const char *folder, nd_manifest *manifest,
                                bool verify, nd_restored *out)
{
    restore r = {.trainer = trainer, .capacity = INT64_MAX, .state = nd_trainer_state_of(trainer)};
    nd_status status = ND_OK;
    r.arrays = r.state.shard_count;
    *out = (nd_restored){0};
    if (trainer->rank->device->kind == ND_DEVICE_CUDA) {
        r.capacity = slice_elements(trainer->model->layout, r.arrays);
        status = ND_ALLOC(r.arrays * r.capacity, &r.host);
    }
    status = status == ND_OK ? read_checkpoint(&r, folder, manifest, verify, out) : status;
    status = nd_shared_agree(trainer->rank, status, folder);
    out->stats = r.source ? nd_source_get_stats(r.source) : out->stats;
    if (status == ND_ERR_DATA) {
        status = confirm(trainer, folder, out->stats.suspect);
    }
    for (int a = 0; a < r.arrays && status == ND_OK; a++) { /* to the others that hold it */
        status = nd_shared_pass_on(trainer->rank, trainer->model->layout, r.state.shards[a], NULL);
    }
    if (status == ND_OK) {
        nd_trainer_resume_at(trainer, manifest->position);
    }
    /* The copies of the weights are stale, also where a load that fails has overwritten some. */
    nd_fsdp_weights_changed(&trainer->model->fsdp);
    out->moments = r.arrays > 1;
    nd_source_close(r.source);
    free(r.host);
    return status;
}
