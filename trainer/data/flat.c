// SPDX-License-Identifier: Apache-2.0
/*
 * Data files that are one flat array of ids: text (a byte is its id), llm.c and, once they are
 * checked, the .bin of Megatron and the cache of an encoded text.
 *
 * llm.c: 256 int32 of header (magic, version, token count), then the ids. Source: llm.c dev/data.
 */
#include "trainer/data/formats.h"

#include <string.h>
#include <unistd.h>

#include "runtime/base/math.h"
#include "trainer/corpus/stream.h"

/* Reads the id at p, which need not be aligned. Files are little-endian, and so are the machines
 * that this program runs on. */
static int64_t id_at(const uint8_t *p, nd_token_type type)
{
    const int rest = 64 - 8 * type.width;
    uint64_t id = 0;
    memcpy(&id, p, type.width);
    return type.is_signed ? (int64_t)(id << rest) >> rest : (int64_t)id;
}

static nd_status bad_id(const nd_dataset *dataset, int64_t token, int64_t id)
{
    size_t byte = dataset->first_byte + (size_t)token * dataset->type.width;
    if (id < 0) {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\": token %lld (byte %zu) has the negative id %lld: the file is damaged "
            "or has another token type",
            dataset->path, (long long)token, byte, (long long)id);
    }
    return nd_fail(
        ND_ERR_DATA,
        "\"%s\": token %lld (byte %zu) has id %lld, but the model's vocabulary ends at %lld; "
        "tokenize the data for this model, or use a model whose vocab_size is above %lld",
        dataset->path, (long long)token, byte, (long long)id, (long long)dataset->vocab - 1,
        (long long)id);
}

static nd_status read_ids(const nd_dataset *dataset, int64_t first, int64_t count, int32_t *out)
{
    size_t size = dataset->type.width;
    size_t begin = dataset->first_byte + (size_t)first * size;
    const uint8_t *p = dataset->map.data + begin;
    for (int64_t i = 0; i < count; i++, p += size) {
        int64_t id = id_at(p, dataset->type);
        if (id < 0 || id >= dataset->vocab) {
            return bad_id(dataset, first + i, id);
        }
        out[i] = (int32_t)id;
    }
    return ND_OK;
}

nd_status nd_piece_read(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                        int32_t *labels)
{
    const int64_t place = piece->place, room = dataset->sequence - place;
    const int64_t head = nd_min(piece->count, room);
    const uint64_t width = dataset->type.width;
    if (dataset->cache) {
        ND_TRY(nd_token_cache_check(dataset->cache,
                                    dataset->first_byte + (uint64_t)piece->first * width,
                                    (uint64_t)piece->count * width));
    }
    ND_TRY(read_ids(dataset, piece->first, head, inputs + place));
    memcpy(labels + place, inputs + place + 1, (size_t)(head - 1) * sizeof *labels);
    if (piece->count > room) {
        ND_TRY(read_ids(dataset, piece->first + room, 1, labels + place + room - 1));
    }
    return nd_spans_ignore(dataset, piece, labels);
}

nd_status nd_flat_holds(const nd_dataset *dataset, int32_t id, size_t bytes, bool *found)
{
    const size_t size = dataset->type.width;
    const uint8_t *p = dataset->map.data + dataset->first_byte;
    const int64_t count = nd_min(dataset->tokens, (int64_t)(bytes / size));
    *found = false;
    for (int64_t i = 0; i < count && !*found; i++) {
        *found = id_at(p + (size_t)i * size, dataset->type) == id;
    }
    return ND_OK;
}

nd_status nd_text_open(nd_dataset *dataset)
{
    const uint8_t *data = dataset->map.data;
    const size_t size = dataset->map.size;
    ND_TRY(nd_text_check(dataset->path, data, size));
    /* As in a text that is encoded, and in JSON rows, a byte order mark is not text. */
    dataset->first_byte = size >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    dataset->type = (nd_token_type){1, false};
    dataset->tokens = (int64_t)(size - dataset->first_byte);
    return ND_OK;
}

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

nd_status nd_llmc_has_magic(const char *path, bool *out)
{
    int32_t magic = 0;
    int fd = -1;
    struct stat st;
    nd_status status = nd_fs_open(path, ND_ERR_DATA, &fd, &st);
    *out = false;
    if (status == ND_OK && st.st_size >= (off_t)sizeof magic) {
        status = nd_fs_pread(fd, path, &magic, sizeof magic, 0);
        *out = magic == MAGIC_GPT2 || magic == MAGIC_LLAMA3;
    }
    if (fd >= 0) {
        close(fd);
    }
    return status == ND_ERR_DATA ? ND_OK : status; /* no file, which its reader says */
}

nd_status nd_llmc_open(nd_dataset *dataset)
{
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
        dataset->type = (nd_token_type){2, false};
    } else if (magic == MAGIC_LLAMA3 && version == 7) {
        dataset->type = (nd_token_type){4, false};
    } else {
        return nd_fail(
            ND_ERR_DATA,
            "\"%s\" begins with magic %d, version %d; llm.c files have %d, 1 (GPT-2, 16-bit "
            "ids) or %d, 7 (Llama 3, 32-bit ids); set data.format to what the file is",
            path, magic, version, MAGIC_GPT2, MAGIC_LLAMA3);
    }
    size_t width = dataset->type.width;
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
