// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/token_file.h"

#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"

enum {
    VERSION = 2,
    HEADER_BYTES = ND_LOSS_MASK_HEADER_BYTES,
    DIGEST_BYTES = ND_LOSS_MASK_DIGEST_BYTES,
    SPAN_BYTES = 16,
    PIECES = 256,
    PIECE_BYTES = 64 << 10
};

static const char magic[8] = "NDMASK\0";

typedef struct mask_header {
    char magic[8];
    uint32_t version, zero;
    uint64_t tokens, spans, ignored;
    char index_sha256[DIGEST_BYTES];
    char bin_sha256[DIGEST_BYTES];
} mask_header;

_Static_assert(sizeof(mask_header) == HEADER_BYTES, "the header has no holes");

/* Every message about a mask begins with its name and ends alike. */
#define ADVICE            "; write the token files and their mask again"
#define FAIL(format, ...) nd_fail(ND_ERR_DATA, "the loss mask \"%s\"" format ADVICE, __VA_ARGS__)

static nd_status check_header(const uint8_t *data, size_t size, const char *name, mask_header *h)
{
    const size_t least = HEADER_BYTES + DIGEST_BYTES;
    char hex[DIGEST_BYTES + 1];
    if (size < least) {
        return FAIL(" has %zu bytes, less than the %zu of one without spans: it is truncated", name,
                    size, least);
    }
    memcpy(h, data, sizeof *h);
    if (memcmp(h->magic, magic, sizeof magic) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" lies beside token files as their loss mask, but does not begin with "
                       "NDMASK" ADVICE ", or rename it",
                       name);
    }
    if (h->version != VERSION || h->zero != 0) {
        return FAIL(" has version %u; version %d is read", name, h->version, VERSION);
    }
    if (h->spans != (size - least) / SPAN_BYTES || (size - least) % SPAN_BYTES != 0) {
        return FAIL(
            " has %zu bytes, which does not match its %llu spans: it is truncated or damaged", name,
            size, (unsigned long long)h->spans);
    }
    ND_TRY(nd_sha256(data, size - DIGEST_BYTES, hex));
    return memcmp(hex, data + size - DIGEST_BYTES, DIGEST_BYTES) == 0
               ? ND_OK
               : FAIL(" is damaged: its bytes do not have the SHA-256 that stands at its end",
                      name);
}

static nd_status check_spans(const mask_header *h, const uint8_t *pairs, const char *name)
{
    uint64_t before = 0, ignored = 0;
    for (uint64_t i = 0; i < h->spans; i++) {
        uint64_t span[2];
        memcpy(span, pairs + i * SPAN_BYTES, sizeof span);
        if (span[0] < before || span[1] <= span[0] || span[1] > h->tokens) {
            return FAIL(": span %llu is %llu to %llu behind %llu, of %llu tokens", name,
                        (unsigned long long)i, (unsigned long long)span[0],
                        (unsigned long long)span[1], (unsigned long long)before,
                        (unsigned long long)h->tokens);
        }
        before = span[1];
        ignored += span[1] - span[0];
    }
    return ignored == h->ignored
               ? ND_OK
               : FAIL(" states %llu tokens in its spans, which have %llu", name,
                      (unsigned long long)h->ignored, (unsigned long long)ignored);
}

nd_status nd_loss_mask_parse(const uint8_t *data, size_t size, const char *name,
                             nd_loss_mask_view *out)
{
    mask_header h;
    ND_TRY(check_header(data, size, name, &h));
    ND_TRY(check_spans(&h, data + HEADER_BYTES, name));
    if (h.ignored == h.tokens && h.tokens > 0) {
        return nd_fail(ND_ERR_DATA,
                       "by the loss mask \"%s\" none of the %llu tokens counts in the loss; "
                       "completions, or turns of the assistant, are missing",
                       name, (unsigned long long)h.tokens);
    }
    *out = (nd_loss_mask_view){.tokens = h.tokens,
                               .spans = h.spans,
                               .ignored = h.ignored,
                               .pairs = data + HEADER_BYTES,
                               .digest = (const char *)data + size - DIGEST_BYTES};
    return ND_OK;
}

/* SHA-256 of a .bin of up to 16 MiB; of a larger one, that of pieces, the first at its beginning,
 * the last at its end and the others evenly between them. */
static nd_status hash_bin(const char *bin, char hex[65])
{
    uint8_t piece[PIECE_BYTES];
    struct stat st;
    int fd;
    nd_hash *hash = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_open(bin, ND_ERR_DATA, &fd, &st));
    if (st.st_size <= PIECES * PIECE_BYTES) {
        close(fd);
        return nd_sha256_file(bin, hex);
    }
    const int64_t last = st.st_size - PIECE_BYTES, step = last / (PIECES - 1);
    ND_TRY_OUT(nd_hash_create(ND_HASH_SHA256, &hash));
    ND_TRY_OUT(nd_hash_begin(hash));
    for (int i = 0; i < PIECES; i++) {
        ND_TRY_OUT(nd_fs_pread(fd, bin, piece, sizeof piece, i == PIECES - 1 ? last : step * i));
        ND_TRY_OUT(nd_hash_add(hash, piece, sizeof piece));
    }
    ND_TRY_OUT(nd_hash_end_text(hash, hex));
out:
    nd_hash_destroy(hash);
    close(fd);
    return status;
}

static nd_status check_pair(const mask_header *h, const char *name, const char *bin,
                            const char *idx, int64_t tokens)
{
    char hex[DIGEST_BYTES + 1];
    if (h->tokens != (uint64_t)tokens) {
        return FAIL(" is for %llu tokens, but \"%s\" has %lld: it belongs to other token files",
                    name, (unsigned long long)h->tokens, bin, (long long)tokens);
    }
    ND_TRY(nd_sha256_file(idx, hex));
    if (memcmp(h->index_sha256, hex, DIGEST_BYTES) != 0) {
        return FAIL(" was made for another index than \"%s\": it belongs to other token files",
                    name, idx);
    }
    ND_TRY(hash_bin(bin, hex));
    return memcmp(h->bin_sha256, hex, DIGEST_BYTES) == 0
               ? ND_OK
               : FAIL(" was made for other tokens than those of \"%s\": it belongs to other token "
                      "files, or the tokens changed since",
                      name, bin);
}

nd_status nd_loss_mask_read(const char *path, const char *bin, const char *idx, int64_t tokens,
                            uint8_t **data, nd_loss_mask_view *out)
{
    /* No two spans touch that the writers make; others may. */
    const size_t most = HEADER_BYTES + SPAN_BYTES * (size_t)tokens + DIGEST_BYTES;
    char *text;
    size_t size;
    mask_header h;
    bool there = false; /* a link to nowhere is no reason to count all tokens */
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_read(path, most, ND_ERR_DATA, &text, &size));
    *data = (uint8_t *)text;
    ND_TRY(nd_loss_mask_parse(*data, size, path, out));
    memcpy(&h, *data, sizeof h);
    return check_pair(&h, path, bin, idx, tokens);
}

nd_status nd_loss_mask_make(const nd_u64s *spans, const char *bin, const char *idx, int64_t tokens,
                            nd_bytes *out)
{
    mask_header h = {.version = VERSION, .tokens = (uint64_t)tokens};
    char hex[DIGEST_BYTES + 1];
    memcpy(h.magic, magic, sizeof magic);
    ND_TRY(nd_sha256_file(idx, hex));
    memcpy(h.index_sha256, hex, DIGEST_BYTES);
    ND_TRY(hash_bin(bin, hex));
    memcpy(h.bin_sha256, hex, DIGEST_BYTES);
    ND_TRY(nd_bytes_add(out, &h, sizeof h));
    for (size_t i = 0; i < spans->count; i += 2) {
        const uint64_t *span = &spans->data[i];
        h.ignored += span[1] - span[0];
        if (i > 0 && span[-1] == span[0]) {
            memcpy(out->data + out->count - sizeof *span, &span[1], sizeof *span);
        } else {
            ND_TRY(nd_bytes_add(out, span, SPAN_BYTES));
            h.spans++;
        }
    }
    memcpy(out->data, &h, sizeof h);
    ND_TRY(nd_sha256(out->data, out->count, hex));
    return nd_bytes_add(out, hex, DIGEST_BYTES);
}
