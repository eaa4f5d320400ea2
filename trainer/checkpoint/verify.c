// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "trainer/checkpoint/source_files.h"

/* The head is what the mesh in the manifest asks for, and every chunk has its digest. */
static nd_status verify_chunks(const nd_source *source, const nd_source_file *file,
                               const nd_shard_plan *plan, int kind, const nd_read_file *reading,
                               int64_t *bytes)
{
    for (int64_t c = 0; c < file->hashed->chunks; c++) {
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

static nd_status verify_file(nd_source *source, const nd_source_writer *writer, int kind,
                             int64_t *bytes)
{
    const nd_source_file *file = &writer->files[kind];
    char *path = NULL;
    int fd = -1;
    uint64_t size = 0;
    ND_TRY(nd_source_open_plain(source->folder, file->name, file->bytes, &fd, &size));
    nd_status status = nd_fs_format(&path, "%s/%s", source->folder, file->name);
    if (status == ND_OK) {
        nd_read_file reading = {.fd = fd,
                                .path = path,
                                .hashed = file->hashed,
                                .kind = source->manifest->checksum,
                                .staging = source->staging};
        status = verify_chunks(source, file, &writer->plan, kind, &reading, bytes);
    }
    free(path);
    close(fd);
    return status;
}

static nd_status verify_writer(nd_source *source, int rank, int64_t *bytes, int64_t *files)
{
    nd_source_writer *writer = NULL;
    nd_status status = nd_source_writer_of(source, rank, &writer);
    for (int k = 0; k < ND_RECT_KIND_COUNT && status == ND_OK; k++) {
        if (writer->plan.heads[k]) {
            status = verify_file(source, writer, k, bytes);
            ++*files;
        }
    }
    ++*files; /* the hash file */
    nd_source_writer_free(writer);
    source->writers[rank] = NULL;
    return status;
}

static nd_status count_files(const char *folder, int64_t *count)
{
    DIR *dir = opendir(folder);
    *count = 0;
    if (!dir) {
        return nd_fail(ND_ERR_DATA, "cannot read folder \"%s\": %s", folder, strerror(errno));
    }
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        *count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    }
    closedir(dir);
    return ND_OK;
}

nd_status nd_source_verify_all(const char *folder, const nd_manifest *manifest,
                               int64_t *verified_bytes)
{
    nd_source *source = NULL;
    int64_t expected = 0, found = 0;
    nd_status status = ND_OK;
    *verified_bytes = 0;
    ND_TRY(nd_source_open_checkpoint(folder, manifest, true, &source));
    for (int rank = 0; rank < manifest->writer_count; rank++) {
        ND_TRY_OUT(verify_writer(source, rank, verified_bytes, &expected));
    }
    ND_TRY_OUT(count_files(source->folder, &found));
    if (found != expected) { /* torch's reader takes every file of the folder */
        status = nd_fail(ND_ERR_DATA, "\"%s\" holds %lld files; the checkpoint has %lld",
                         source->folder, (long long)found, (long long)expected);
    }
out:
    nd_source_close(source);
    return status;
}
