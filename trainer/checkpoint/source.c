// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/source.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/source_files.h"

/* A checkpoint of ours. */

nd_status nd_source_open_checkpoint(const char *folder, const nd_manifest *manifest, bool verify,
                                    nd_source **out)
{
    nd_source *source = NULL;
    nd_status status = ND_OK;
    nd_fs_kind kind;
    int tp = manifest->mesh.size[ND_AXIS_TP];
    ND_TRY(nd_source_create(folder, ND_STATE_FOLDER, &source));
    source->manifest = manifest;
    source->verify = verify;
    ND_TRY_OUT(nd_fs_look_at_link(source->folder, &kind, NULL));
    if (kind != ND_FS_FOLDER) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" is missing or no folder", source->folder);
        goto out;
    }
    ND_TRY_OUT(nd_chunk_hash_create(manifest->checksum, &source->digester));
    ND_TRY_OUT(ND_ALLOC(manifest->writer_count, &source->writers));
    ND_TRY_OUT(ND_ALLOC(tp, &source->layouts));
    for (int t = 0; t < tp; t++) {
        nd_coord coord = {{0}};
        coord.at[ND_AXIS_TP] = t;
        ND_TRY_OUT(nd_manifest_layout(manifest, &manifest->mesh, coord, &source->layouts[t]));
    }
    *out = source;
    source = NULL;
out:
    nd_source_close(source);
    return status;
}

/* The writer's hash file must be the one that the manifest knows, and list what the plan has. */
static nd_status read_hashes(const nd_source *source, int rank, const nd_shard_plan *plan,
                             nd_hashes *out)
{
    char name[ND_HASH_FILE_NAME_MAX], digest[ND_DIGEST_TEXT_MAX], *path = NULL;
    uint8_t *head = NULL;
    uint64_t size = 0;
    int fd = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_hashes_init(out, plan, source->manifest->checksum));
    nd_hash_file_name(name, rank);
    ND_TRY(nd_source_open_plain(source->folder, name, out->bytes, &fd, &size));
    ND_TRY_OUT(nd_fs_format(&path, "%s/%s", source->folder, name));
    ND_TRY_OUT(nd_alloc(out->head_bytes, 1, (void **)&head));
    memcpy(head, out->data, out->head_bytes);
    ND_TRY_OUT(nd_fs_pread(fd, path, out->data, out->bytes, 0));
    ND_TRY_OUT(nd_digest_text(source->manifest->checksum, out->data, out->bytes, digest));
    if (strcmp(digest, source->manifest->writers[rank].digest) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" is damaged, or of another checkpoint: its digest is not the one "
                         "in the manifest",
                         path);
    } else if (memcmp(head, out->data, out->head_bytes) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" lists other files of rank %d than the mesh in the manifest asks "
                         "for",
                         path, rank);
    }
out:
    free(head);
    free(path);
    close(fd);
    return status;
}

static nd_status make_writer(nd_source *source, int rank, nd_source_writer *writer)
{
    const nd_manifest *m = source->manifest;
    nd_holder holder = nd_holder_of(&m->mesh, rank);
    nd_shard_plan_options options = {.layout = source->layouts[holder.tp],
                                     .mesh = &m->mesh,
                                     .rank = rank,
                                     .arrays = m->arrays,
                                     .extras = m->extras,
                                     .extra_count = m->extra_count};
    ND_TRY(nd_shard_plan_init(&writer->plan, &options));
    ND_TRY(read_hashes(source, rank, &writer->plan, &writer->hashes));
    for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
        nd_source_file *file = &writer->files[k];
        memcpy(file->name, writer->plan.names[k], ND_DCP_FILE_NAME_MAX);
        file->bytes = writer->plan.file_bytes[k];
        file->digests = writer->hashes.digests[k];
    }
    return ND_OK;
}

nd_status nd_source_writer_of(nd_source *source, int rank, nd_source_writer **out)
{
    if (!source->writers[rank]) {
        nd_source_writer *writer = NULL;
        ND_TRY(ND_ALLOC(1, &writer));
        nd_status status = make_writer(source, rank, writer);
        if (status != ND_OK) {
            source->stats.suspect = status == ND_ERR_DATA ? rank + 1 : 0;
            nd_source_writer_free(writer);
            return status;
        }
        source->writers[rank] = writer;
    }
    *out = source->writers[rank];
    return ND_OK;
}

/* What one writer has of the wanted rectangle. */
static nd_status add_from_writer(nd_source *source, int rank, const nd_param *p,
                                 nd_state_kind array, const nd_rect *rect, float *to,
                                 int64_t *found)
{
    nd_source_writer *writer = NULL;
    ND_TRY(nd_source_writer_of(source, rank, &writer));
    const nd_shard_plan *plan = &writer->plan;
    int unit = p->unit->index;
    for (int i = plan->first_piece[unit]; i < plan->first_piece[unit + 1]; i++) {
        const nd_piece *piece = &plan->pieces[i];
        if (piece->param == p) {
            const nd_dcp_entry *entry =
                &plan->lists[piece->kind].entries[plan->first_entry[i] + array];
            ND_TRY(nd_source_plan_read(&writer->files[piece->kind], entry, rect, to, found));
        }
    }
    return ND_OK;
}

/* Only the shards that overlap the rectangle's rows in this tp rank's block. */
static nd_status add_from_tp(nd_source *source, int tp, const nd_param *param, nd_state_kind array,
                             const nd_rect *rect, float *to, int64_t *found)
{
    const nd_layout *layout = source->layouts[tp];
    const nd_mesh *mesh = &source->manifest->mesh;
    const nd_param *p = nd_layout_param(layout, param->id, param->layer);
    const nd_segment *segment = &p->unit->segments[p->segment];
    nd_rect block = nd_held_part(layout, p, 0).block, shared;
    if (!p->owned || !nd_rect_intersect(&block, rect, &shared)) {
        return ND_OK;
    }
    /* The bytes from its first to its last element. */
    int64_t begin = p->offset + (shared.row - block.row) * block.cols + shared.col - block.col;
    int64_t end = begin + (shared.rows - 1) * block.cols + shared.cols;
    for (int64_t s = begin / segment->shard_count; s * segment->shard_count < end; s++) {
        for (int r = 0; r < mesh->size[ND_AXIS_DP_REPLICATE]; r++) {
            nd_holder holder = {.shard = (int)s, .tp = tp, .replica = r};
            ND_TRY(
                add_from_writer(source, nd_holder_rank(mesh, &holder), p, array, rect, to, found));
        }
    }
    return ND_OK;
}

nd_status nd_source_add_extra(nd_source *source, const char *name, int64_t count, float *to)
{
    nd_source_writer *writer = NULL;
    int64_t found = 0;
    const nd_rect rect = {.axes = 1, .rows = count, .cols = 1};
    ND_TRY(nd_source_writer_of(source, 0, &writer));
    const nd_dcp_list *list = &writer->plan.lists[ND_RECT_BODY];
    for (int64_t i = 0; i < list->count; i++) {
        if (strcmp(list->entries[i].name, name) == 0) {
            ND_TRY(nd_source_plan_read(&writer->files[ND_RECT_BODY], &list->entries[i], &rect, to,
                                       &found));
        }
    }
    source->stats.wanted_bytes += count * (int64_t)sizeof *to;
    return found == count ? ND_OK
                          : nd_fail(ND_ERR_DATA, "\"%s\" holds %lld of %lld elements of \"%s\"",
                                    source->folder, (long long)found, (long long)count, name);
}

/* All. */

nd_status nd_source_add(nd_source *source, const nd_param *param, nd_state_kind array,
                        const nd_rect *rect, float *to)
{
    source->stats.wanted_bytes += nd_rect_elements(rect) * (int64_t)sizeof *to;
    if (!source->manifest) {
        return nd_source_add_dcp(source, param, array, rect, to);
    }
    int64_t found = 0;
    ND_ASSERT((int)array < source->manifest->arrays);
    for (int t = 0; t < source->manifest->mesh.size[ND_AXIS_TP]; t++) {
        ND_TRY(add_from_tp(source, t, param, array, rect, to, &found));
    }
    ND_ASSERT(found == nd_rect_elements(rect)); /* the plan covers every tensor */
    return ND_OK;
}

nd_status nd_source_run(nd_source *source)
{
    for (int i = 0; source->writers && i < source->manifest->writer_count; i++) {
        for (int k = 0; source->writers[i] && k < ND_RECT_KIND_COUNT; k++) {
            nd_status status = nd_source_run_file(source, &source->writers[i]->files[k]);
            if (status != ND_OK) {
                source->stats.suspect = status == ND_ERR_DATA ? i + 1 : 0;
                return status;
            }
        }
    }
    for (int64_t i = 0; i < source->file_count; i++) {
        ND_TRY(nd_source_run_file(source, &source->files[i]));
    }
    return ND_OK;
}

void nd_source_trim(nd_source *source)
{
    enum { KEPT_MAX = 128 };
    int kept = 0, count = source->writers ? source->manifest->writer_count : 0;
    for (int i = 0; i < count; i++) {
        kept += source->writers[i] ? 1 : 0;
    }
    for (int i = 0; i < count && kept > KEPT_MAX; i++) {
        nd_source_writer_free(source->writers[i]);
        source->writers[i] = NULL;
    }
}

nd_source_stats nd_source_get_stats(const nd_source *source)
{
    return source->stats;
}
