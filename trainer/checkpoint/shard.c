// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/shard.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"

/* Names. */

const char *const nd_state_kind_names[ND_STATE_KINDS] = {"master", "exp_avg", "exp_avg_sq"};

const char *nd_state_name(char name[ND_STATE_NAME_MAX], nd_state_kind array, const char *param)
{
    if (array == ND_STATE_MASTER) {
        snprintf(name, ND_STATE_NAME_MAX, "%s", param);
    } else {
        snprintf(name, ND_STATE_NAME_MAX, "optimizer.state.%s.%s", param,
                 nd_state_kind_names[array]);
    }
    return name;
}

const nd_checksum_hashes nd_checksums[ND_CHECKSUM_COUNT] = {
    [ND_CHECKSUM_XXH3] = {"xxh3", ND_HASH_XXH3_64, ND_HASH_XXH3_128},
    [ND_CHECKSUM_SHA256] = {"sha256", ND_HASH_SHA256, ND_HASH_SHA256},
};

nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX])
{
    char hex[ND_HASH_HEX_MAX];
    ND_TRY(nd_hash_text(nd_checksums[kind].whole, data, bytes, hex));
    snprintf(out, ND_DIGEST_TEXT_MAX, "%s:%s", nd_checksums[kind].name, hex);
    return ND_OK;
}

const char *nd_hash_file_name(char name[ND_HASH_FILE_NAME_MAX], int rank)
{
    snprintf(name, ND_HASH_FILE_NAME_MAX, "shard-%05d.hashes", rank + 1);
    return name;
}

/* Pieces. */

nd_holder nd_holder_of(const nd_mesh *mesh, int rank)
{
    nd_coord coord = nd_mesh_coord_of(mesh, rank);
    return (nd_holder){.shard = nd_mesh_group_index(mesh, ND_GROUP_DP_SHARD_CP, rank),
                       .tp = coord.at[ND_AXIS_TP],
                       .replica = coord.at[ND_AXIS_DP_REPLICATE],
                       .replicas = mesh->size[ND_AXIS_DP_REPLICATE]};
}

/* The part of a parameter in a shard, without padding: elements [begin, end) of the flat state
 * arrays, where all of the local block begins at element block.begin. begin == end: it is empty. */
typedef struct held {
    nd_span block;
    int64_t begin, end;
} held;

static held held_part(const nd_layout *layout, const nd_param *p, int shard)
{
    const nd_segment *segment = &p->unit->segments[p->segment];
    held h = {.block = {.param = p,
                        .row = p->row_begin,
                        .col = p->col_begin,
                        /* the last tp ranks may hold padding of the vocabulary only */
                        .rows = nd_max(nd_min(p->rows - p->row_begin, p->local_rows), 0),
                        .cols = p->local_cols,
                        .begin = segment->shard_offset + p->offset - segment->shard_count * shard}};
    const int64_t end = h.block.begin + nd_span_elements(&h.block);
    h.begin = nd_max(h.block.begin, segment->shard_offset);
    h.end = nd_max(nd_min(end, segment->shard_offset + segment->shard_count), h.begin);
    return h;
}

/* `cut` elements into the held range, moved down to the beginning of a row: both replicas at a cut
 * compute the same place. */
static int64_t row_at(const held *h, int64_t cut)
{
    if (cut <= 0) {
        return h->begin;
    }
    if (cut >= h->end - h->begin) {
        return h->end;
    }
    const int64_t within = (h->begin + cut - h->block.begin) / h->block.cols * h->block.cols;
    return nd_max(h->block.begin + within, h->begin);
}

typedef struct cutting {
    nd_piece *out;
    int count;
    int64_t elements; /* of the range that is cut */
} cutting;

static nd_status add_piece(void *context, const nd_span *span)
{
    cutting *c = context;
    const bool whole_rows = span->cols == span->param->local_cols;
    c->out[c->count++] =
        (nd_piece){.span = *span,
                   .kind = whole_rows || nd_span_elements(span) == c->elements ? ND_PIECE_BODY
                           : span->col > span->param->col_begin                ? ND_PIECE_HEAD
                                                                               : ND_PIECE_TAIL};
    return ND_OK;
}

int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out)
{
    int64_t total = 0, before = 0;
    cutting c = {.out = out};
    for (int i = 0; i < layout->param_count; i++) {
        const held h = held_part(layout, &layout->params[i], holder->shard);
        total += layout->params[i].owned ? h.end - h.begin : 0;
    }
    /* This replica's part of all that the holders of this shard write, in elements. */
    int64_t share = total / holder->replicas, rest = total % holder->replicas;
    int64_t r = holder->replica;
    int64_t first = share * r + nd_min(r, rest), last = first + share + (r < rest);
    for (int i = 0; i < layout->param_count && before < last; i++) {
        if (layout->params[i].owned) {
            const held h = held_part(layout, &layout->params[i], holder->shard);
            const int64_t begin = row_at(&h, first - before), end = row_at(&h, last - before);
            before += h.end - h.begin;
            c.elements = end - begin;
            (void)nd_span_each_part(&h.block, begin, end, add_piece, &c);
        }
    }
    return c.count;
}

/* The contents of a file. */

enum { HEAD_ALIGNMENT = 4096, STEP_BYTES = sizeof(float) };

/* The writer of a tensor's first element writes its step too. That element is always in a body. */
static bool has_step(const nd_shard_plan *plan, const nd_piece *piece)
{
    return plan->arrays > 1 && piece->span.row == 0 && piece->span.col == 0;
}

typedef struct header {
    FILE *out;
    bool shards; /* what is written: the sharding string, or the tensors */
    const char *comma;
    uint64_t at; /* byte of the data */
} header;

/* "[0,128]", as many numbers as the tensor has axes. */
static void put_numbers(FILE *out, int axes, int64_t first, int64_t second)
{
    fputc('[', out);
    if (axes > 0) {
        fprintf(out, "%lld", (long long)first);
    }
    if (axes > 1) {
        fprintf(out, ",%lld", (long long)second);
    }
    fputc(']', out);
}

/* An entry of a file: a rectangle of a tensor, which has so many axes, in F32. The sharding string
 * is JSON inside a JSON string: its quotes have a backslash. Names are printable ASCII without
 * quotes and backslashes. */
static void put_entry(header *h, const char *name, int axes, const nd_span *span)
{
    const uint64_t end = h->at + (uint64_t)nd_span_elements(span) * sizeof(float);
    if (h->shards) {
        fprintf(h->out, "%s\\\"%s\\\":{\\\"saved_offsets\\\":", h->comma, name);
        put_numbers(h->out, axes, span->row, span->col);
        fputc('}', h->out);
        h->comma = ",";
        return;
    }
    fprintf(h->out, ",\"%s\":{\"dtype\":\"F32\",\"shape\":", name);
    put_numbers(h->out, axes, span->rows, span->cols);
    fprintf(h->out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)h->at,
            (unsigned long long)end);
    h->at = end;
}

/* The entries of a file, in the order of their data. */
static void put_entries(header *h, const nd_shard_plan *plan, nd_piece_kind kind, bool shards)
{
    char name[ND_STATE_NAME_MAX];
    const nd_span scalar = {.rows = 1, .cols = 1};
    h->shards = shards;
    for (int i = 0; i < plan->piece_count; i++) {
        const nd_piece *piece = &plan->pieces[i];
        for (int a = 0; a < plan->arrays && piece->kind == kind; a++) {
            nd_state_name(name, (nd_state_kind)a, piece->span.param->name);
            put_entry(h, name, piece->span.param->axes, &piece->span);
        }
    }
    for (int i = 0; i < plan->extra_count && kind == ND_PIECE_BODY; i++) {
        const nd_span all = {.rows = plan->extras[i].count, .cols = 1};
        put_entry(h, plan->extras[i].name, 1, &all);
    }
    for (int i = 0; i < plan->piece_count && kind == ND_PIECE_BODY; i++) {
        if (has_step(plan, &plan->pieces[i])) {
            snprintf(name, sizeof name, "optimizer.state.%s.step",
                     plan->pieces[i].span.param->name);
            put_entry(h, name, 0, &scalar);
        }
    }
}

/* Little-endian; returns the byte behind it. */
static uint8_t *put_number(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
    return out + bytes;
}

/* Length, JSON, and spaces up to a multiple of HEAD_ALIGNMENT. */
static nd_status make_head(const nd_shard_plan *plan, nd_piece_kind kind, nd_shard_file *file)
{
    char *text = NULL;
    size_t length = 0;
    header h = {.out = open_memstream(&text, &length), .comma = ""};
    if (h.out) {
        fputs("........", h.out); /* the length of what follows */
        fputs("{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\","
              "\"DCP_SHARDING_INFO\":\"{",
              h.out);
        put_entries(&h, plan, kind, true);
        fputs("}\"}", h.out);
        put_entries(&h, plan, kind, false);
        fputc('}', h.out);
    }
    const bool written = h.out && fclose(h.out) == 0;
    const size_t bytes = nd_round_up_bytes(length, HEAD_ALIGNMENT);
    if (!written || nd_alloc(bytes, 1, (void **)&file->head) != ND_OK) {
        free(text);
        return nd_fail_memory("the header of a checkpoint's file");
    }
    memcpy(file->head, text, length);
    free(text);
    memset(file->head + length, ' ', bytes - length);
    put_number((uint8_t *)file->head, bytes - 8, 8);
    file->head_bytes = bytes;
    file->bytes += bytes;
    return ND_OK;
}

/* Plan. */

/* Gives each piece and extra array its place, as if files had no headers. */
static void place_data(nd_shard_plan *plan)
{
    nd_shard_file *body = &plan->files[ND_PIECE_BODY];
    for (int i = 0; i < plan->piece_count; i++) {
        nd_piece *piece = &plan->pieces[i];
        nd_shard_file *file = &plan->files[piece->kind];
        piece->begin = file->bytes;
        piece->before = plan->elements;
        const int64_t elements = nd_span_elements(&piece->span) * plan->arrays;
        file->bytes += (uint64_t)elements * sizeof(float);
        plan->elements += elements;
        plan->step_count += has_step(plan, piece);
    }
    plan->extras_begin = body->bytes;
    for (int i = 0; i < plan->extra_count; i++) {
        body->bytes += (uint64_t)plan->extras[i].count * sizeof(float);
    }
    body->bytes += (uint64_t)plan->step_count * STEP_BYTES;
}

static nd_status add_heads(nd_shard_plan *plan)
{
    int count = 0, index = 0;
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        count += plan->files[k].bytes > 0;
    }
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        nd_shard_file *file = &plan->files[k];
        if (file->bytes > 0) {
            ND_TRY(make_head(plan, (nd_piece_kind)k, file));
            plan->bytes += file->bytes;
            snprintf(file->name, sizeof file->name, "shard-%05d-model-%05d-of-%05d.safetensors",
                     plan->rank + 1, ++index, count);
        }
    }
    for (int i = 0; i < plan->piece_count; i++) {
        plan->pieces[i].begin += plan->files[plan->pieces[i].kind].head_bytes;
    }
    plan->extras_begin += plan->files[ND_PIECE_BODY].head_bytes;
    return ND_OK;
}

enum {
    HASHES_HEAD_BYTES = 24,
    HASHED_FILE_BYTES = ND_SHARD_FILE_NAME_MAX + 16,
    HASHES_VERSION = 1
};

static uint64_t chunks_of(const nd_shard_file *file)
{
    return (uint64_t)nd_ceil_div((int64_t)file->bytes, ND_CHUNK_BYTES);
}

static nd_status make_hashes(nd_shard_plan *plan)
{
    const size_t width = (size_t)nd_hash_bytes(nd_checksums[plan->checksum].chunk);
    uint64_t files = 0, chunks = 0;
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        files += plan->files[k].head != NULL;
        chunks += chunks_of(&plan->files[k]);
    }
    plan->hashes_head_bytes = HASHES_HEAD_BYTES + files * HASHED_FILE_BYTES;
    plan->hashes_bytes = plan->hashes_head_bytes + chunks * width;
    ND_TRY(nd_alloc(plan->hashes_bytes, 1, (void **)&plan->hashes));
    uint8_t *at = plan->hashes + 8, *digests = plan->hashes + plan->hashes_head_bytes;
    memcpy(plan->hashes, "NDHASHES", 8);
    at = put_number(at, HASHES_VERSION, 4);
    at = put_number(at, (uint64_t)plan->checksum, 4);
    at = put_number(at, width, 4);
    at = put_number(at, files, 4);
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        nd_shard_file *file = &plan->files[k];
        if (file->head) {
            memcpy(at, file->name, ND_SHARD_FILE_NAME_MAX);
            at = put_number(at + ND_SHARD_FILE_NAME_MAX, file->bytes, 8);
            at = put_number(at, chunks_of(file), 8);
            file->digests = digests;
            digests += chunks_of(file) * width;
        }
    }
    return ND_OK;
}

nd_status nd_shard_plan_init(nd_shard_plan *plan, const nd_shard_plan_options *options)
{
    nd_status status = ND_OK;
    const nd_layout *layout = options->layout;
    nd_holder holder = nd_holder_of(options->mesh, options->rank);
    ND_ASSERT(options->arrays == 1 || options->arrays == ND_STATE_KINDS);
    ND_ASSERT(options->extra_count <= ND_STATE_EXTRAS_MAX);
    *plan = (nd_shard_plan){.layout = layout,
                            .rank = options->rank,
                            .arrays = options->arrays,
                            .checksum = options->checksum,
                            .extra_count = options->rank == 0 ? options->extra_count : 0};
    for (int i = 0; i < plan->extra_count; i++) {
        plan->extras[i] = options->extras[i];
    }
    ND_TRY_OUT(ND_ALLOC(3 * layout->param_count, &plan->pieces));
    ND_TRY_OUT(ND_ALLOC(layout->unit_count + 1, &plan->first_piece));
    plan->piece_count = nd_pieces_written(layout, &holder, plan->pieces);
    for (int u = 0, piece = 0; u <= layout->unit_count; u++) {
        while (piece < plan->piece_count && plan->pieces[piece].span.param->unit->index < u) {
            piece++;
        }
        plan->first_piece[u] = piece;
    }
    place_data(plan);
    ND_TRY_OUT(add_heads(plan));
    ND_TRY_OUT(make_hashes(plan));
out:
    if (status != ND_OK) {
        nd_shard_plan_fini(plan);
    }
    return status;
}

void nd_shard_plan_fini(nd_shard_plan *plan)
{
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        free(plan->files[k].head);
    }
    free(plan->hashes);
    free(plan->first_piece);
    free(plan->pieces);
    *plan = (nd_shard_plan){0};
}

/* A file that is written from front to back. */

enum {
    SLICE_BYTES = 1 << 20,       /* hashed, then written while it is still in the cache */
    WRITEBACK_BYTES = 32 << 20,  /* writeback of this much is started at once */
    MAX_DIRTY_BYTES = 512 << 20, /* what may wait for the disk */
};

typedef struct open_file {
    int fd;
    char *path; /* NULL: there is no such file, or it is closed */
    uint64_t bytes, written;
    uint64_t started; /* writeback was started up to here */
    uint64_t waited;  /* and is known to be complete up to here */
    nd_hash *hash;    /* of the current chunk */
    size_t width;     /* bytes of a digest */
    uint8_t *digests; /* where that of the current chunk goes */
} open_file;

static nd_status fail_write(const char *path, int code)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", path, strerror(code));
}

/* Its space is reserved first, so that a full disk shows before the data are sent. */
static nd_status create(const nd_shard_plan *plan, const nd_shard_file *of, const char *folder,
                        open_file *file)
{
    const nd_hash_kind kind = nd_checksums[plan->checksum].chunk;
    *file = (open_file){
        .fd = -1, .bytes = of->bytes, .width = (size_t)nd_hash_bytes(kind), .digests = of->digests};
    ND_TRY(nd_fs_format(&file->path, "%s/%s", folder, of->name));
    ND_TRY(nd_hash_create(kind, &file->hash));
    file->fd = nd_fs_create(file->path, 0666);
    if (file->fd < 0) {
        return fail_write(file->path, errno);
    }
    int code = fallocate(file->fd, 0, 0, (off_t)of->bytes) == 0 ? 0 : errno;
    if (code == EOPNOTSUPP || code == ENOSYS) { /* the file system cannot reserve */
        code = ftruncate(file->fd, (off_t)of->bytes) == 0 ? 0 : errno;
    }
    return code == 0 ? ND_OK : fail_write(file->path, code);
}

/* File systems without sync_file_range have only the fsync at the end. */
static nd_status bound_dirty_pages(open_file *file)
{
    if (file->written - file->started >= WRITEBACK_BYTES) {
        (void)sync_file_range(file->fd, (off_t)file->started,
                              (off_t)(file->written - file->started), SYNC_FILE_RANGE_WRITE);
        file->started = file->written;
    }
    if (file->started - file->waited < MAX_DIRTY_BYTES) {
        return ND_OK;
    }
    const unsigned wait =
        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    int code = sync_file_range(file->fd, (off_t)file->waited, WRITEBACK_BYTES, wait) ? errno : 0;
    file->waited += WRITEBACK_BYTES;
    return code == 0 || code == ENOSYS || code == EINVAL || code == ESPIPE
               ? ND_OK
               : fail_write(file->path, code);
}

static nd_status append(open_file *file, const void *data, size_t bytes)
{
    const char *at = data;
    uint8_t digest[ND_HASH_MAX];
    ND_ASSERT(bytes <= file->bytes - file->written);
    while (bytes > 0) {
        const size_t room = ND_CHUNK_BYTES - file->written % ND_CHUNK_BYTES;
        size_t n = bytes < SLICE_BYTES ? bytes : SLICE_BYTES;
        n = n < room ? n : room;
        ND_TRY(room == ND_CHUNK_BYTES ? nd_hash_begin(file->hash) : ND_OK);
        ND_TRY(nd_hash_add(file->hash, at, n));
        ND_TRY(nd_fs_pwrite(file->fd, file->path, at, n, (int64_t)file->written));
        file->written += n;
        at += n;
        bytes -= n;
        if (n == room || file->written == file->bytes) {
            ND_TRY(nd_hash_end(file->hash, digest));
            memcpy(file->digests, digest, file->width);
            file->digests += file->width;
        }
        ND_TRY(bound_dirty_pages(file));
    }
    return ND_OK;
}

nd_status nd_shard_put(const char *folder, const char *name, const void *data, size_t bytes)
{
    char path[PATH_MAX];
    ND_TRY(nd_fs_path(path, "%s/%s", folder, name));
    const int fd = nd_fs_create(path, 0666);
    if (fd < 0) {
        return fail_write(path, errno);
    }
    const nd_status status = nd_fs_pwrite(fd, path, data, bytes, 0);
    if (status != ND_OK) {
        close(fd);
        return status;
    }
    return nd_fs_sync_close(fd, path);
}

/* The files of a writer. */

static nd_status begin_files(const nd_shard_plan *plan, const char *folder,
                             open_file files[ND_PIECE_KINDS])
{
    for (int k = 0; k < ND_PIECE_KINDS; k++) { /* all space is reserved before any is filled */
        const nd_shard_file *of = &plan->files[k];
        ND_TRY(of->head ? create(plan, of, folder, &files[k]) : ND_OK);
    }
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        const nd_shard_file *of = &plan->files[k];
        ND_TRY(of->head ? append(&files[k], of->head, of->head_bytes) : ND_OK);
    }
    return ND_OK;
}

static nd_status write_data(const nd_shard_plan *plan, int64_t updates, const nd_shard_data *data,
                            open_file files[ND_PIECE_KINDS])
{
    const float step = (float)updates;
    open_file *body = &files[ND_PIECE_BODY];
    for (int u = 0; u < plan->layout->unit_count; u++) {
        ND_TRY(data->unit(data->context, u));
        for (int i = plan->first_piece[u]; i < plan->first_piece[u + 1]; i++) {
            const nd_piece *piece = &plan->pieces[i];
            for (int a = 0; a < plan->arrays; a++) {
                ND_TRY(append(&files[piece->kind], data->piece(data->context, i, (nd_state_kind)a),
                              (size_t)nd_span_elements(&piece->span) * sizeof(float)));
            }
        }
    }
    ND_TRY(data->unit(data->context, plan->layout->unit_count));
    for (int i = 0; i < plan->extra_count; i++) {
        ND_TRY(append(body, data->extras[i], (size_t)plan->extras[i].count * sizeof(float)));
    }
    for (int i = 0; i < plan->step_count; i++) {
        ND_TRY(append(body, &step, sizeof step));
    }
    return ND_OK;
}

nd_status nd_shard_write(nd_shard_plan *plan, const char *folder, int64_t updates,
                         const nd_shard_data *data, nd_shard_record *out)
{
    open_file files[ND_PIECE_KINDS] = {0};
    char name[ND_HASH_FILE_NAME_MAX];
    nd_shard_record record = {.bytes = plan->bytes};
    nd_status status = ND_OK;
    ND_TRY_OUT(begin_files(plan, folder, files));
    ND_TRY_OUT(write_data(plan, updates, data, files));
    for (int k = 0; k < ND_PIECE_KINDS; k++) { /* a failed fsync is a failed file, never repeated */
        const int fd = files[k].fd;
        ND_ASSERT(files[k].written == files[k].bytes);
        files[k].fd = -1;
        ND_TRY_OUT(files[k].path ? nd_fs_sync_close(fd, files[k].path) : ND_OK);
    }
    ND_TRY_OUT(nd_digest_text(plan->checksum, plan->hashes, plan->hashes_bytes, record.digest));
    nd_hash_file_name(name, plan->rank);
    ND_TRY_OUT(nd_shard_put(folder, name, plan->hashes, plan->hashes_bytes));
    ND_TRY_OUT(nd_fs_sync_folder(folder));
    *out = record;
out:
    for (int k = 0; k < ND_PIECE_KINDS; k++) {
        if (files[k].path && files[k].fd >= 0) {
            close(files[k].fd);
        }
        nd_hash_destroy(files[k].hash);
        free(files[k].path);
    }
    return status;
}
