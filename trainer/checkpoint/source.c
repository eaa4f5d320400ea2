// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/source.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"
#include "trainer/checkpoint/reads.h"

/* A file of a writer. It is open only while it is read. */
typedef struct source_file {
    const char *name; /* of the plan */
    uint64_t bytes;   /* that it must have */
    const uint8_t *digests;
    nd_reads reads;
} source_file;

/* One rank of the mesh that wrote the checkpoint. */
typedef struct source_writer {
    nd_shard_plan plan;
    nd_hashes hashes;
    source_file files[ND_RECT_KIND_COUNT];
} source_writer;

struct nd_source {
    char *folder; /* with the files */
    nd_hash *digester;
    uint8_t *staging;
    nd_source_stats stats;
    bool verify;
    const nd_manifest *manifest;
    nd_layout **layouts;     /* [tp of the manifest's mesh] */
    source_writer **writers; /* [ranks of that mesh]; NULL until one is needed */
};

/* Files. */

/* A regular file of the folder, not a link: ND_ERR_DATA when it is not there, or of another
 * size. */
static nd_status open_file(const nd_source *source, const char *name, uint64_t bytes, char **path,
                           int *fd)
{
    struct stat st;
    ND_TRY(nd_fs_format(path, "%s/%s", source->folder, name));
    nd_status status = nd_fs_open_own(*path, ND_ERR_DATA, fd, &st);
    if (status == ND_OK && (uint64_t)st.st_size != bytes) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" has %llu bytes; it was written with %llu", *path,
                         (unsigned long long)st.st_size, (unsigned long long)bytes);
        close(*fd);
    }
    if (status != ND_OK) {
        free(*path);
    }
    return status;
}

/* `reading` closes with close_reading. */
static nd_status open_reading(const nd_source *source, const source_file *file,
                              nd_read_file *reading)
{
    char *path = NULL;
    *reading = (nd_read_file){.bytes = file->bytes,
                              .digests = source->verify ? file->digests : NULL,
                              .kind = source->manifest->checksum,
                              .digester = source->digester,
                              .staging = source->staging};
    ND_TRY(open_file(source, file->name, file->bytes, &path, &reading->fd));
    reading->path = path;
    return ND_OK;
}

static void close_reading(const nd_read_file *reading)
{
    close(reading->fd);
    free((char *)reading->path);
}

static void free_writer(source_writer *writer)
{
    if (writer) {
        for (int k = 0; k < ND_RECT_KIND_COUNT; k++) {
            nd_reads_fini(&writer->files[k].reads);
        }
        nd_hashes_fini(&writer->hashes);
        nd_shard_plan_fini(&writer->plan);
        free(writer);
    }
}

static void drop_writer(nd_source *source, int rank)
{
    source->stats.kept -= source->writers[rank] ? 1 : 0;
    free_writer(source->writers[rank]);
    source->writers[rank] = NULL;
}

void nd_source_close(nd_source *source)
{
    if (!source) {
        return;
    }
    for (int i = 0; source->writers && i < source->manifest->writer_count; i++) {
        drop_writer(source, i);
    }
    for (int t = 0; source->layouts && t < source->manifest->mesh.size[ND_AXIS_TP]; t++) {
        nd_layout_destroy(source->layouts[t]);
    }
    free(source->writers);
    free(source->layouts);
    nd_hash_destroy(source->digester);
    free(source->staging);
    free(source->folder);
    free(source);
}

nd_status nd_source_open(const char *folder, const nd_manifest *manifest, bool verify,
                         nd_source **out)
{
    nd_source *source = NULL;
    nd_status status = ND_OK;
    nd_fs_kind kind;
    int tp = manifest->mesh.size[ND_AXIS_TP];
    ND_TRY(ND_ALLOC(1, &source));
    source->manifest = manifest;
    source->verify = verify;
    ND_TRY_OUT(nd_fs_format(&source->folder, "%s/" ND_STATE_FOLDER, folder));
    ND_TRY_OUT(nd_alloc(ND_CHUNK_BYTES, 1, (void **)&source->staging));
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
    int fd = -1;
    nd_status status = ND_OK;
    ND_TRY(nd_hashes_init(out, plan, source->manifest->checksum));
    nd_hash_file_name(name, rank);
    ND_TRY(open_file(source, name, out->bytes, &path, &fd));
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

static nd_status make_writer(nd_source *source, int rank, source_writer *writer)
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
        source_file *file = &writer->files[k];
        file->name = writer->plan.names[k];
        file->bytes = writer->plan.file_bytes[k];
        file->digests = writer->hashes.digests[k];
    }
    return ND_OK;
}

/* The writer's plan and digests; they are made when they are first asked for. */
static nd_status writer_of(nd_source *source, int rank, source_writer **out)
{
    if (!source->writers[rank]) {
        source_writer *writer = NULL;
        ND_TRY(ND_ALLOC(1, &writer));
        nd_status status = make_writer(source, rank, writer);
        if (status != ND_OK) {
            source->stats.suspect = status == ND_ERR_DATA ? rank + 1 : 0;
            free_writer(writer);
            return status;
        }
        source->writers[rank] = writer;
        source->stats.kept++;
    }
    *out = source->writers[rank];
    return ND_OK;
}

/* Reads. */

/* Plans the read of what `want` and a stored rectangle share, of a tensor whose rectangle `want`
 * goes to `to` densely. *found grows by the shared elements. */
static nd_status plan_read(source_file *file, const nd_shard_entry *stored, const nd_rect *want,
                           float *to, int64_t *found)
{
    nd_rect shared;
    const nd_rect *have = &stored->rect;
    if (!nd_rect_intersect(have, want, &shared)) {
        return ND_OK;
    }
    *found += nd_rect_elements(&shared);
    int64_t skipped = (shared.row - have->row) * have->cols + shared.col - have->col;
    nd_read read = {.from = stored->begin + (uint64_t)skipped * sizeof(float),
                    .stride = (uint64_t)have->cols * sizeof(float),
                    .runs = shared.rows,
                    .run = shared.cols,
                    .to_stride = want->cols,
                    .to = to + (shared.row - want->row) * want->cols + shared.col - want->col};
    if (shared.cols == have->cols && shared.cols == want->cols) { /* one run of full rows */
        read.run *= read.runs;
        read.runs = 1;
    }
    return nd_reads_add(&file->reads, &read);
}

/* What one writer has of the wanted rectangle. */
static nd_status add_from_writer(nd_source *source, int rank, const nd_param *p,
                                 nd_state_kind array, const nd_rect *rect, float *to,
                                 int64_t *found)
{
    source_writer *writer = NULL;
    ND_TRY(writer_of(source, rank, &writer));
    const nd_shard_plan *plan = &writer->plan;
    int unit = p->unit->index;
    for (int i = plan->first_piece[unit]; i < plan->first_piece[unit + 1]; i++) {
        const nd_piece *piece = &plan->pieces[i];
        if (piece->param == p) {
            const nd_shard_entry *entry =
                &plan->lists[piece->kind].entries[plan->first_entry[i] + array];
            ND_TRY(plan_read(&writer->files[piece->kind], entry, rect, to, found));
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
    source_writer *writer = NULL;
    int64_t found = 0;
    const nd_rect rect = {.axes = 1, .rows = count, .cols = 1};
    ND_TRY(writer_of(source, 0, &writer));
    const nd_shard_list *list = &writer->plan.lists[ND_RECT_BODY];
    for (int64_t i = 0; i < list->count; i++) {
        if (strcmp(list->entries[i].name, name) == 0) {
            ND_TRY(plan_read(&writer->files[ND_RECT_BODY], &list->entries[i], &rect, to, &found));
        }
    }
    source->stats.wanted_bytes += count * (int64_t)sizeof *to;
    return found == count ? ND_OK
                          : nd_fail(ND_ERR_DATA, "\"%s\" holds %lld of %lld elements of \"%s\"",
                                    source->folder, (long long)found, (long long)count, name);
}

nd_status nd_source_add(nd_source *source, const nd_param *param, nd_state_kind array,
                        const nd_rect *rect, float *to)
{
    source->stats.wanted_bytes += nd_rect_elements(rect) * (int64_t)sizeof *to;
    int64_t found = 0;
    ND_ASSERT((int)array < source->manifest->arrays);
    for (int t = 0; t < source->manifest->mesh.size[ND_AXIS_TP]; t++) {
        ND_TRY(add_from_tp(source, t, param, array, rect, to, &found));
    }
    ND_ASSERT(found == nd_rect_elements(rect)); /* the plan covers every tensor */
    return ND_OK;
}

static nd_status run_file(nd_source *source, source_file *file)
{
    nd_read_file reading;
    if (file->reads.count == 0) {
        return ND_OK;
    }
    ND_TRY(open_reading(source, file, &reading));
    nd_status status = nd_reads_run(&file->reads, &reading, &source->stats.read_bytes);
    close_reading(&reading);
    return status;
}

nd_status nd_source_run(nd_source *source)
{
    for (int i = 0; i < source->manifest->writer_count; i++) {
        for (int k = 0; source->writers[i] && k < ND_RECT_KIND_COUNT; k++) {
            nd_status status = run_file(source, &source->writers[i]->files[k]);
            if (status != ND_OK) {
                source->stats.suspect = status == ND_ERR_DATA ? i + 1 : 0;
                return status;
            }
        }
    }
    return ND_OK;
}

void nd_source_trim(nd_source *source)
{
    enum { KEPT_MAX = 128 };
    const bool much = source->stats.kept > KEPT_MAX;
    for (int i = 0; i < source->manifest->writer_count && much; i++) {
        drop_writer(source, i);
    }
}

nd_source_stats nd_source_get_stats(const nd_source *source)
{
    return source->stats;
}

/* Verification. */

/* The head is what the mesh in the manifest asks for, and every chunk has its digest. */
static nd_status verify_chunks(const nd_source *source, const source_file *file,
                               const nd_shard_plan *plan, int kind, const nd_read_file *reading,
                               int64_t *bytes)
{
    for (int64_t c = 0; c < nd_ceil_div((int64_t)file->bytes, ND_CHUNK_BYTES); c++) {
        size_t size = 0;
        ND_TRY(nd_read_chunk(reading, c, &size));
        size_t begin = (size_t)c * ND_CHUNK_BYTES;
        size_t head = plan->head_bytes[kind] > begin ? plan->head_bytes[kind] - begin : 0;
        head = head < size ? head : size;
        if (memcmp(source->staging, plan->heads[kind] + begin, head) != 0) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" has another header than the mesh in the manifest asks for",
                           reading->path);
        }
        *bytes += (int64_t)size;
    }
    return ND_OK;
}

typedef struct verification {
    nd_source *source;
    bool chunks;   /* else only that the file is there with its size */
    int64_t bytes; /* verified */
    int64_t files; /* that the checkpoint has */
} verification;

static nd_status verify_file(verification *v, const source_writer *writer, int kind)
{
    const source_file *file = &writer->files[kind];
    nd_read_file reading;
    nd_status status = ND_OK;
    ND_TRY(open_reading(v->source, file, &reading));
    if (v->chunks) {
        status = verify_chunks(v->source, file, &writer->plan, kind, &reading, &v->bytes);
    } else {
        v->bytes += (int64_t)file->bytes;
    }
    close_reading(&reading);
    return status;
}

static nd_status verify_writer(verification *v, int rank)
{
    source_writer *writer = NULL;
    nd_status status = writer_of(v->source, rank, &writer);
    for (int k = 0; k < ND_RECT_KIND_COUNT && status == ND_OK; k++) {
        if (writer->plan.heads[k]) {
            status = verify_file(v, writer, k);
            v->files++;
        }
    }
    v->files++; /* the hash file */
    drop_writer(v->source, rank);
    return status;
}

static nd_status verify(const char *folder, const nd_manifest *manifest, bool chunks,
                        int64_t *bytes)
{
    verification v = {.chunks = chunks};
    nd_fs_names names = {0};
    nd_status status = ND_OK;
    *bytes = 0;
    ND_TRY(nd_source_open(folder, manifest, true, &v.source));
    for (int rank = 0; rank < manifest->writer_count; rank++) {
        ND_TRY_OUT(verify_writer(&v, rank));
    }
    ND_TRY_OUT(nd_fs_list(v.source->folder, &names));
    if (names.count != v.files) { /* torch's reader takes every file of the folder */
        status = nd_fail(ND_ERR_DATA, "\"%s\" holds %d files; the checkpoint has %lld",
                         v.source->folder, names.count, (long long)v.files);
    }
    *bytes = v.bytes;
out:
    nd_fs_names_fini(&names);
    nd_source_close(v.source);
    return status;
}

nd_status nd_source_verify_all(const char *folder, const nd_manifest *manifest,
                               int64_t *verified_bytes)
{
    return verify(folder, manifest, true, verified_bytes);
}

nd_status nd_source_verify_writer(const char *folder, const nd_manifest *manifest, int writer)
{
    verification v = {.chunks = true};
    ND_TRY(nd_source_open(folder, manifest, true, &v.source));
    nd_status status = verify_writer(&v, writer);
    nd_source_close(v.source);
    return status;
}

nd_status nd_source_check_files(const char *folder, const nd_manifest *manifest, int64_t *bytes)
{
    return verify(folder, manifest, false, bytes);
}
