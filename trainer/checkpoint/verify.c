// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/math.h"
#include "trainer/checkpoint/source_files.h"

/* The head is what the mesh in the manifest asks for, and every chunk has its digest. */
static nd_status verify_chunks(const nd_source *source, const nd_source_file *file,
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

static nd_status verify_file(verification *v, const nd_source_writer *writer, int kind)
{
    const nd_source *source = v->source;
    const nd_source_file *file = &writer->files[kind];
    char *path = NULL;
    int fd = -1;
    uint64_t size = 0;
    ND_TRY(nd_source_open_plain(source->folder, file->name, file->bytes, &fd, &size));
    nd_status status = nd_fs_format(&path, "%s/%s", source->folder, file->name);
    if (status == ND_OK && v->chunks) {
        nd_read_file reading = {.fd = fd,
                                .path = path,
                                .bytes = file->bytes,
                                .digests = file->digests,
                                .kind = source->manifest->checksum,
                                .digester = source->digester,
                                .staging = source->staging};
        status = verify_chunks(source, file, &writer->plan, kind, &reading, &v->bytes);
    } else {
        v->bytes += (int64_t)size;
    }
    free(path);
    close(fd);
    return status;
}

static nd_status verify_writer(verification *v, int rank)
{
    nd_source_writer *writer = NULL;
    nd_status status = nd_source_writer_of(v->source, rank, &writer);
    for (int k = 0; k < ND_RECT_KIND_COUNT && status == ND_OK; k++) {
        if (writer->plan.heads[k]) {
            status = verify_file(v, writer, k);
            v->files++;
        }
    }
    v->files++; /* the hash file */
    nd_source_writer_free(writer);
    v->source->writers[rank] = NULL;
    return status;
}

static nd_status verify(const char *folder, const nd_manifest *manifest, bool chunks,
                        int64_t *bytes)
{
    verification v = {.chunks = chunks};
    nd_fs_names names = {0};
    nd_status status = ND_OK;
    *bytes = 0;
    ND_TRY(nd_source_open_checkpoint(folder, manifest, true, &v.source));
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
    ND_TRY(nd_source_open_checkpoint(folder, manifest, true, &v.source));
    nd_status status = verify_writer(&v, writer);
    nd_source_close(v.source);
    return status;
}

nd_status nd_source_check_files(const char *folder, const nd_manifest *manifest, int64_t *bytes)
{
    return verify(folder, manifest, false, bytes);
}
