// SPDX-License-Identifier: Apache-2.0
/* llm.c token files: 256 int32 of header (magic, version, token count), then the ids. Source: llm.c
 * dev/data. */
#include "trainer/data/formats.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum {
    HEADER_BYTES = 1024,
    MAGIC_GPT2 = 20240520,   /* version 1, u16 ids */
    MAGIC_LLAMA3 = 20240801, /* version 7, u32 ids */
};

static int32_t word(const uint8_t *data, int index)
{
    int32_t x;
    memcpy(&x, data + 4 * index, sizeof x);
    return x;
}

bool nd_llmc_has_magic(const char *path)
{
    int32_t magic = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return false;
    }
    bool whole = read(fd, &magic, sizeof magic) == (ssize_t)sizeof magic;
    close(fd);
    return whole && (magic == MAGIC_GPT2 || magic == MAGIC_LLAMA3);
}

nd_status nd_llmc_open(nd_dataset *dataset)
{
    ND_TRY(nd_fs_map_open(dataset->path, ND_ERR_DATA, &dataset->map));
    const uint8_t *data = dataset->map.data;
    size_t size = dataset->map.size;
    const char *path = dataset->path;
    if (size < HEADER_BYTES) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" has %zu bytes, less than the %d of an llm.c header: it is truncated or "
            "not an llm.c file",
            path, size, HEADER_BYTES);
    }
    int32_t magic = word(data, 0), version = word(data, 1), count = word(data, 2);
    if (magic == MAGIC_GPT2 && version == 1) {
        dataset->type = ND_TOKEN_U16;
    } else if (magic == MAGIC_LLAMA3 && version == 7) {
        dataset->type = ND_TOKEN_U32;
    } else {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" begins with magic %d, version %d; llm.c files have %d, 1 (GPT-2, 16-bit "
            "ids) or %d, 7 (Llama 3, 32-bit ids): set data.format to what the file is",
            path, magic, version, MAGIC_GPT2, MAGIC_LLAMA3);
    }
    size_t width = nd_token_size(dataset->type);
    if (count < 0 || size != HEADER_BYTES + (size_t)count * width) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %zu bytes, but its header announces %d tokens of %zu bytes, %zu "
                       "bytes with the header: it is truncated or was written only in part",
                       path, size, count, width,
                       HEADER_BYTES + (count < 0 ? 0 : (size_t)count * width));
    }
    dataset->first_byte = HEADER_BYTES;
    dataset->tokens = count;
    return ND_OK;
}
