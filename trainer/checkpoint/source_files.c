// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/source_files.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"

nd_status nd_source_open_plain(const char *folder, const char *name, uint64_t bytes, int *fd,
                               uint64_t *size)
{
    char *path = NULL;
    struct stat st;
    int file = -1;
    ND_TRY(nd_fs_format(&path, "%s/%s", folder, name));
    nd_status status = nd_fs_open_own(path, ND_ERR_DATA, &file, &st);
    if (status == ND_OK && bytes > 0 && (uint64_t)st.st_size != bytes) {
        status = nd_fail(ND_ERR_DATA, "\"%s\" has %llu bytes; it was written with %llu", path,
                         (unsigned long long)st.st_size, (unsigned long long)bytes);
        close(file);
    }
    free(path);
    ND_TRY(status);
    *fd = file;
    *size = (uint64_t)st.st_size;
    return ND_OK;
}

nd_status nd_source_plan_read(nd_source_file *file, const nd_dcp_entry *stored, const nd_rect *want,
                              float *to, int64_t *found)
{
    nd_rect shared;
    const nd_rect *have = &stored->rect;
    if (!nd_rect_intersect(have, want, &shared)) {
        return ND_OK;
    }
    *found += nd_rect_elements(&shared);
    uint64_t width = (uint64_t)nd_safetensors_dtype_bits(stored->dtype) / 8;
    int64_t skipped = (shared.row - have->row) * have->cols + shared.col - have->col;
    nd_read read = {.from = stored->begin + (uint64_t)skipped * width,
                    .stride = (uint64_t)have->cols * width,
                    .runs = shared.rows,
                    .run = shared.cols,
                    .to_stride = want->cols,
                    .to = to + (shared.row - want->row) * want->cols + shared.col - want->col,
                    .dtype = stored->dtype};
    if (shared.cols == have->cols && shared.cols == want->cols) { /* one run of full rows */
        read.run *= read.runs;
        read.runs = 1;
    }
    return nd_reads_add(&file->reads, &read);
}

nd_status nd_source_run_file(nd_source *source, nd_source_file *file)
{
    char *path = NULL;
    int fd = -1;
    uint64_t size = 0;
    if (file->reads.count == 0) {
        return ND_OK;
    }
    ND_TRY(nd_fs_format(&path, "%s/%s", source->folder, file->name));
    nd_status status = nd_source_open_plain(source->folder, file->name, file->bytes, &fd, &size);
    if (status == ND_OK) {
        nd_read_file reading = {
            .fd = fd,
            .path = path,
            .bytes = file->bytes,
            .digests = source->verify ? file->digests : NULL,
            .kind = source->manifest ? source->manifest->checksum : ND_CHECKSUM_XXH3,
            .digester = source->digester,
            .staging = source->staging,
        };
        status = nd_reads_run(&file->reads, &reading, &source->stats.read_bytes);
        close(fd);
    }
    free(path);
    return status;
}

nd_status nd_source_create(const char *folder, const char *inside, nd_source **out)
{
    nd_source *source = NULL;
    ND_TRY(ND_ALLOC(1, &source));
    nd_status status =
        nd_fs_format(&source->folder, "%s%s%s", folder, inside ? "/" : "", inside ? inside : "");
    if (status == ND_OK) {
        status = nd_alloc(ND_CHUNK_BYTES, 1, (void **)&source->staging);
    }
    if (status != ND_OK) {
        nd_source_close(source);
        return status;
    }
    *out = source;
    return ND_OK;
}

void nd_source_writer_free(nd_source_writer *writer)
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

void nd_source_close(nd_source *source)
{
    if (!source) {
        return;
    }
    for (int i = 0; source->writers && i < source->manifest->writer_count; i++) {
        nd_source_writer_free(source->writers[i]);
    }
    for (int t = 0; source->layouts && t < source->manifest->mesh.size[ND_AXIS_TP]; t++) {
        nd_layout_destroy(source->layouts[t]);
    }
    for (int64_t i = 0; i < source->file_count; i++) {
        nd_reads_fini(&source->files[i].reads);
        nd_dcp_list_fini(&source->lists[i]);
    }
    free(source->writers);
    free(source->layouts);
    free(source->entries);
    free(source->lists);
    free(source->files);
    nd_hash_destroy(source->digester);
    free(source->staging);
    free(source->folder);
    free(source);
}
