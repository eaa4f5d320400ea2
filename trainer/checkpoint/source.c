// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/source.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"

/* Read, hashed and copied to where it is wanted while it is in the cache of a core. */
enum { SLICE_BYTES = 256 << 10 };

/* Runs of bytes with a stride in the file and another in memory. */
typedef struct source_read {
    uint64_t from;     /* byte of the file */
    uint64_t stride;   /* bytes between the beginnings of two runs in the file */
    int64_t runs, run; /* number of runs, elements of each */
    int64_t to_stride; /* elements between them in memory */
    float *to;         /* F32, as in the file; NULL: the bytes are verified and not kept */
} source_read;

typedef struct source_reads {
    source_read *list;
    int64_t count, capacity;
} source_reads;

/* One rank of the mesh that wrote the checkpoint: its files, and what is to be read of each. */
typedef struct source_writer {
    nd_shard_plan plan;
    source_reads reads[ND_PIECE_KINDS];
} source_writer;

struct nd_source {
    char *folder; /* with the files */
    nd_hash *digester;
    uint8_t *staging; /* SLICE_BYTES */
    nd_source_stats stats;
    bool verify;
    const nd_manifest *manifest;
    nd_layout **layouts;     /* [tp of the manifest's mesh] */
    source_writer **writers; /* [ranks of that mesh]; NULL until one is needed */
};

static void free_writer(source_writer *writer)
{
    if (writer) {
        for (int k = 0; k < ND_PIECE_KINDS; k++) {
            free(writer->reads[k].list);
        }
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
    ND_TRY_OUT(nd_alloc(SLICE_BYTES, 1, (void **)&source->staging));
    ND_TRY_OUT(nd_fs_look_at_link(source->folder, &kind, NULL));
    if (kind != ND_FS_FOLDER) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" is missing or no folder", source->folder);
        goto out;
    }
    ND_TRY_OUT(nd_hash_create(nd_checksums[manifest->checksum].chunk, &source->digester));
    ND_TRY_OUT(ND_ALLOC(manifest->writer_count, &source->writers));
    ND_TRY_OUT(ND_ALLOC(tp, &source->layouts));
    for (int t = 0; t < tp; t++) {
        nd_coord coord = {{0}};
        coord.at[ND_AXIS_TP] = t;
        ND_TRY_OUT(nd_manifest_layout(&manifest->shape, manifest->layout, &manifest->mesh, coord,
                                      &source->layouts[t]));
    }
    *out = source;
    source = NULL;
out:
    nd_source_close(source);
    return status;
}

/* A regular file of the folder, not a link: ND_ERR_DATA when it is not there, or of another size.
 * It is closed by the caller. */
static nd_status open_file(const nd_source *source, const char *name, uint64_t bytes,
                           char path[PATH_MAX], int *fd)
{
    struct stat st;
    ND_TRY(nd_fs_path(path, "%s/%s", source->folder, name));
    ND_TRY(nd_fs_open_own(path, ND_ERR_DATA, fd, &st));
    if ((uint64_t)st.st_size != bytes) {
        close(*fd);
        *fd = -1;
        return nd_fail(ND_ERR_DATA, "\"%s\" has %llu bytes; it was written with %llu", path,
                       (unsigned long long)st.st_size, (unsigned long long)bytes);
    }
    return ND_OK;
}

/* The writer's hash file must be the one that the manifest knows, and list what the plan has. */
static nd_status read_hashes(const nd_source *source, nd_shard_plan *plan)
{
    char name[ND_HASH_FILE_NAME_MAX], digest[ND_DIGEST_TEXT_MAX], path[PATH_MAX];
    uint8_t *data = NULL;
    int fd = -1;
    nd_status status = ND_OK;
    nd_hash_file_name(name, plan->rank);
    ND_TRY(open_file(source, name, plan->hashes_bytes, path, &fd));
    ND_TRY_OUT(nd_alloc(plan->hashes_bytes, 1, (void **)&data));
    ND_TRY_OUT(nd_fs_pread(fd, path, data, plan->hashes_bytes, 0));
    ND_TRY_OUT(nd_digest_text(plan->checksum, data, plan->hashes_bytes, digest));
    if (strcmp(digest, source->manifest->writers[plan->rank].digest) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" is damaged, or of another checkpoint: its digest is not the one "
                         "in the manifest",
                         path);
    } else if (memcmp(data, plan->hashes, plan->hashes_head_bytes) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" lists other files of rank %d than the mesh in the manifest asks "
                         "for",
                         path, plan->rank);
    } else {
        memcpy(plan->hashes, data, plan->hashes_bytes);
    }
out:
    free(data);
    close(fd);
    return status;
}

static nd_status make_writer(nd_source *source, int rank, source_writer *writer)
{
    const nd_manifest *m = source->manifest;
    const int tp = nd_mesh_coord_of(&m->mesh, rank).at[ND_AXIS_TP];
    nd_shard_plan_options options = {.layout = source->layouts[tp],
                                     .mesh = &m->mesh,
                                     .rank = rank,
                                     .arrays = m->arrays,
                                     .extras = m->extras,
                                     .extra_count = m->extra_count,
                                     .checksum = m->checksum};
    ND_TRY(nd_shard_plan_init(&writer->plan, &options));
    return read_hashes(source, &writer->plan);
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

/* Adding reads. */

/* The rows and columns that two rectangles of a tensor share. False: none, and *out is not set. */
static bool intersect(const nd_span *a, const nd_span *b, nd_span *out)
{
    int64_t row = nd_max(a->row, b->row), col = nd_max(a->col, b->col);
    int64_t rows = nd_min(a->row + a->rows, b->row + b->rows) - row;
    int64_t cols = nd_min(a->col + a->cols, b->col + b->cols) - col;
    if (rows <= 0 || cols <= 0) {
        return false;
    }
    *out = (nd_span){.param = a->param, .row = row, .col = col, .rows = rows, .cols = cols};
    return true;
}

static nd_status add_read(source_reads *reads, const source_read *read)
{
    if (reads->count == reads->capacity) {
        int64_t capacity = reads->capacity ? 2 * reads->capacity : 64;
        void *list = realloc(reads->list, (size_t)capacity * sizeof *reads->list);
        if (!list) {
            return nd_fail_memory("%lld reads of a checkpoint", (long long)capacity);
        }
        reads->list = list;
        reads->capacity = capacity;
    }
    reads->list[reads->count++] = *read;
    return ND_OK;
}

/* Plans the read of what `want` and a stored rectangle share. The stored one begins at a byte of
 * its file, the wanted one goes to `to`, both densely. *found grows by the shared elements. */
static nd_status plan_read(source_reads *reads, const nd_span *have, uint64_t begin,
                           const nd_span *want, float *to, int64_t *found)
{
    nd_span shared;
    if (!intersect(have, want, &shared)) {
        return ND_OK;
    }
    *found += nd_span_elements(&shared);
    int64_t skipped = (shared.row - have->row) * have->cols + shared.col - have->col;
    source_read read = {.from = begin + (uint64_t)skipped * sizeof(float),
                        .stride = (uint64_t)have->cols * sizeof(float),
                        .runs = shared.rows,
                        .run = shared.cols,
                        .to_stride = want->cols,
                        .to = to + (shared.row - want->row) * want->cols + shared.col - want->col};
    if (shared.cols == have->cols && shared.cols == want->cols) { /* one run of full rows */
        read.run *= read.runs;
        read.runs = 1;
    }
    return add_read(reads, &read);
}

/* Plans to read the pieces of the wanted rectangle that one writer has. */
static nd_status add_from_writer(nd_source *source, int rank, const nd_param *p,
                                 nd_state_kind array, const nd_span *want, float *to,
                                 int64_t *found)
{
    source_writer *writer = NULL;
    ND_TRY(writer_of(source, rank, &writer));
    const nd_shard_plan *plan = &writer->plan;
    int unit = p->unit->index;
    for (int i = plan->first_piece[unit]; i < plan->first_piece[unit + 1]; i++) {
        const nd_piece *piece = &plan->pieces[i];
        const uint64_t bytes = (uint64_t)nd_span_elements(&piece->span) * sizeof(float);
        if (piece->span.param == p) {
            ND_TRY(plan_read(&writer->reads[piece->kind], &piece->span,
                             piece->begin + bytes * (uint64_t)array, want, to, found));
        }
    }
    return ND_OK;
}

/* Only the shards that overlap the rectangle's rows in this tp rank's block. */
static nd_status add_from_tp(nd_source *source, int tp, nd_state_kind array, const nd_span *want,
                             float *to, int64_t *found)
{
    const nd_layout *layout = source->layouts[tp];
    const nd_mesh *mesh = &source->manifest->mesh;
    const nd_param *p = nd_layout_param(layout, want->param->id, want->param->layer);
    const nd_segment *segment = &p->unit->segments[p->segment];
    const nd_span block = {.row = p->row_begin,
                           .col = p->col_begin,
                           .rows = nd_min(p->local_rows, p->rows - p->row_begin),
                           .cols = p->local_cols};
    nd_span shared;
    if (!p->owned || !intersect(&block, want, &shared)) {
        return ND_OK;
    }
    /* The bytes from its first to its last element. */
    int64_t begin = p->offset + (shared.row - block.row) * block.cols + shared.col - block.col;
    int64_t end = begin + (shared.rows - 1) * block.cols + shared.cols;
    for (int64_t s = begin / segment->shard_count; s * segment->shard_count < end; s++) {
        for (int r = 0; r < mesh->size[ND_AXIS_DP_REPLICATE]; r++) {
            nd_coord holder = {0}; /* as nd_holder_of counts */
            holder.at[ND_AXIS_DP_REPLICATE] = r;
            holder.at[ND_AXIS_DP_SHARD] = (int)s / mesh->size[ND_AXIS_CP];
            holder.at[ND_AXIS_CP] = (int)s % mesh->size[ND_AXIS_CP];
            holder.at[ND_AXIS_TP] = tp;
            ND_TRY(
                add_from_writer(source, nd_mesh_rank_of(mesh, holder), p, array, want, to, found));
        }
    }
    return ND_OK;
}

nd_status nd_source_add_extra(nd_source *source, const char *name, int64_t count, float *to)
{
    source_writer *writer = NULL;
    int64_t found = 0;
    const nd_span all = {.rows = count, .cols = 1};
    ND_TRY(writer_of(source, 0, &writer));
    uint64_t begin = writer->plan.extras_begin;
    for (int i = 0; i < writer->plan.extra_count; i++) {
        const nd_state_extra *extra = &writer->plan.extras[i];
        const nd_span stored = {.rows = extra->count, .cols = 1};
        if (strcmp(extra->name, name) == 0) {
            ND_TRY(plan_read(&writer->reads[ND_PIECE_BODY], &stored, begin, &all, to, &found));
        }
        begin += (uint64_t)extra->count * sizeof *to;
    }
    source->stats.wanted_bytes += count * (int64_t)sizeof *to;
    return found == count ? ND_OK
                          : nd_fail(ND_ERR_DATA, "\"%s\" holds %lld of %lld elements of \"%s\"",
                                    source->folder, (long long)found, (long long)count, name);
}

nd_status nd_source_add(nd_source *source, const nd_span *want, nd_state_kind array, float *to)
{
    source->stats.wanted_bytes += nd_span_elements(want) * (int64_t)sizeof *to;
    int64_t found = 0;
    ND_ASSERT((int)array < source->manifest->arrays);
    for (int t = 0; t < source->manifest->mesh.size[ND_AXIS_TP]; t++) {
        ND_TRY(add_from_tp(source, t, array, want, to, &found));
    }
    ND_ASSERT(found == nd_span_elements(want)); /* the plan covers every tensor */
    return ND_OK;
}

/* Reading. */

static int by_place(const void *a, const void *b)
{
    const source_read *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static uint64_t end_of(const source_read *read)
{
    return read->from + (uint64_t)(read->runs - 1) * read->stride +
           (uint64_t)read->run * sizeof(float);
}

/* The part of a read that lies in bytes [begin, end) of the file, which are at `data`. Elements do
 * not straddle these bounds. */
static void scatter(const source_read *read, uint64_t begin, uint64_t end, const uint8_t *data)
{
    const uint64_t width = sizeof *read->to, run_bytes = (uint64_t)read->run * width;
    int64_t first = 0;
    if (!read->to) {
        return;
    }
    if (begin > read->from + run_bytes && read->stride > 0) { /* runs that end before */
        first = (int64_t)((begin - read->from - run_bytes) / read->stride);
    }
    for (int64_t r = first; r < read->runs; r++) {
        uint64_t run = read->from + (uint64_t)r * read->stride;
        if (run >= end) {
            break;
        }
        uint64_t from = run > begin ? run : begin;
        uint64_t to = run + run_bytes < end ? run + run_bytes : end;
        if (from < to) {
            memcpy(read->to + r * read->to_stride + (int64_t)((from - run) / width),
                   data + (from - begin), to - from);
        }
    }
}

/* Chunk after chunk: each that a read reaches is read and verified once. */
static nd_status read_chunks(nd_source *source, const nd_shard_file *file,
                             const source_reads *reads, const char *path, int fd)
{
    const size_t width = (size_t)nd_hash_bytes(nd_checksums[source->manifest->checksum].chunk);
    uint8_t digest[ND_HASH_MAX];
    int64_t next = 0; /* reads before it end before what is read next */
    for (int64_t index = 0; next < reads->count; index++) {
        index = nd_max(index, (int64_t)(reads->list[next].from / ND_CHUNK_BYTES));
        const uint64_t begin = (uint64_t)index * ND_CHUNK_BYTES;
        const uint64_t end =
            begin + (uint64_t)nd_min((int64_t)(file->bytes - begin), ND_CHUNK_BYTES);
        if (end_of(&reads->list[reads->count - 1]) > end) {
            posix_fadvise(fd, (off_t)end, ND_CHUNK_BYTES, POSIX_FADV_WILLNEED);
        }
        ND_TRY(nd_hash_begin(source->digester));
        for (uint64_t at = begin, upto; at < end; at = upto) {
            upto = at + (uint64_t)nd_min((int64_t)(end - at), SLICE_BYTES);
            ND_TRY(nd_fs_pread(fd, path, source->staging, upto - at, (int64_t)at));
            ND_TRY(source->verify ? nd_hash_add(source->digester, source->staging, upto - at)
                                  : ND_OK);
            for (int64_t i = next; i < reads->count && reads->list[i].from < upto; i++) {
                scatter(&reads->list[i], at, upto, source->staging);
            }
            while (next < reads->count && end_of(&reads->list[next]) <= upto) {
                next++;
            }
        }
        ND_TRY(source->verify ? nd_hash_end(source->digester, digest) : ND_OK);
        if (source->verify && memcmp(digest, file->digests + (size_t)index * width, width) != 0) {
            return nd_fail(ND_ERR_DATA,
                           "\"%s\" is damaged: bytes %llu to %llu are not those that were written",
                           path, (unsigned long long)begin, (unsigned long long)end);
        }
        source->stats.read_bytes += (int64_t)(end - begin);
    }
    return ND_OK;
}

/* Does the reads of a file, and empties their list. */
static nd_status run_file(nd_source *source, source_writer *writer, int kind)
{
    const nd_shard_file *file = &writer->plan.files[kind];
    source_reads *reads = &writer->reads[kind];
    char path[PATH_MAX];
    int fd = -1;
    if (reads->count == 0) {
        return ND_OK;
    }
    ND_TRY(open_file(source, file->name, file->bytes, path, &fd));
    qsort(reads->list, (size_t)reads->count, sizeof *reads->list, by_place);
    nd_status status = read_chunks(source, file, reads, path, fd);
    reads->count = 0;
    close(fd);
    return status;
}

nd_status nd_source_run(nd_source *source)
{
    enum { KEPT_MAX = 128 };
    const bool drops = source->stats.kept > KEPT_MAX;
    for (int i = 0; i < source->manifest->writer_count; i++) {
        for (int k = 0; source->writers[i] && k < ND_PIECE_KINDS; k++) {
            nd_status status = run_file(source, source->writers[i], k);
            if (status != ND_OK) {
                source->stats.suspect = status == ND_ERR_DATA ? i + 1 : 0;
                return status;
            }
        }
        if (drops) {
            drop_writer(source, i);
        }
    }
    return ND_OK;
}

nd_source_stats nd_source_get_stats(const nd_source *source)
{
    return source->stats;
}

/* Verification. */

/* Every chunk has its digest, and the head is what the mesh in the manifest asks for. */
static nd_status verify_file(nd_source *source, source_writer *writer, int kind)
{
    const nd_shard_file *file = &writer->plan.files[kind];
    source_read head = {.runs = 1, .run = (int64_t)(file->head_bytes / sizeof(float))};
    const source_read data = {.from = file->head_bytes,
                              .runs = 1,
                              .run = (int64_t)((file->bytes - file->head_bytes) / sizeof(float))};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(head.run, &head.to));
    ND_TRY_OUT(add_read(&writer->reads[kind], &head));
    ND_TRY_OUT(add_read(&writer->reads[kind], &data));
    ND_TRY_OUT(run_file(source, writer, kind));
    if (memcmp(head.to, file->head, file->head_bytes) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s/%s\" has another header than the mesh in the manifest asks for",
                         source->folder, file->name);
    }
out:
    free(head.to);
    return status;
}

/* The files of one writer, with `reads` all their bytes. Adds how many there are, and their bytes
 * without those of the hash file. */
static nd_status verify_writer(nd_source *source, int rank, bool reads, int64_t *files,
                               int64_t *bytes)
{
    source_writer *writer = NULL;
    ND_TRY(writer_of(source, rank, &writer));
    nd_status status = ND_OK;
    for (int k = 0; k < ND_PIECE_KINDS && status == ND_OK; k++) {
        const nd_shard_file *file = &writer->plan.files[k];
        char path[PATH_MAX];
        int fd = -1;
        if (file->head && reads) {
            status = verify_file(source, writer, k);
        } else if (file->head) {
            status = open_file(source, file->name, file->bytes, path, &fd);
        }
        if (fd >= 0) {
            close(fd);
        }
        *bytes += (int64_t)file->bytes;
        *files += file->head != NULL;
    }
    ++*files; /* the hash file */
    drop_writer(source, rank);
    return status;
}

nd_status nd_source_verify(const char *folder, const nd_manifest *manifest, int only, bool reads,
                           int64_t *bytes)
{
    nd_source *source = NULL;
    nd_fs_names names = {0};
    nd_status status = ND_OK;
    int64_t files = 0;
    *bytes = 0;
    ND_TRY(nd_source_open(folder, manifest, true, &source));
    for (int rank = 0; rank < manifest->writer_count; rank++) {
        ND_TRY_OUT(only < 0 || rank == only ? verify_writer(source, rank, reads, &files, bytes)
                                            : ND_OK);
    }
    ND_TRY_OUT(only < 0 ? nd_fs_list(source->folder, &names) : ND_OK);
    if (only < 0 && names.count != files) { /* torch's reader takes every file of the folder */
        status = nd_fail(ND_ERR_DATA, "\"%s\" holds %d files; the checkpoint has %lld",
                         source->folder, names.count, (long long)files);
    }
out:
    nd_fs_names_fini(&names);
    nd_source_close(source);
    return status;
}
