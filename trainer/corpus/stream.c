// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/stream.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"

enum {
    MAGIC_BYTES = 4, /* of zstd; gzip has 2 */
    IN_BYTES = 256 << 10,
    OUT_BYTES_MAX = 1 << 30, /* of one call of zlib, which counts in 32 bits */
    WINDOW_LOG_MAX = 27,     /* zstd: 128 MiB */
    EXPANSION_MAX = 1000,
    EXPANSION_FREE = 256 << 20, /* bytes that any file may expand to */
    GZIP_ONLY = 16 + 15         /* windowBits: the largest window, a gzip header */
};

typedef enum compression { PLAIN = 0, GZIP, ZSTD } compression;

struct nd_text_stream {
    char *path;
    int fd;
    compression kind;
    uint8_t *in; /* (IN_BYTES) */
    size_t at, filled;
    uint64_t consumed, produced;
    bool inside; /* a member or frame has begun and not ended */
    z_stream gzip;
    ZSTD_DStream *zstd;
};

static const nd_file_kind kinds[] = {
    {"\x1f\x8b", 2, "compressed with gzip", "unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", 4, "compressed with zstd", "unpack it with unzstd"},
    {"\xfd"
     "7zXZ",
     5, "compressed with xz", "unpack it with unxz"},
    {"BZh91AY&SY", 10, "compressed with bzip2", "unpack it with bunzip2"},
    {"PK\x03\x04", 4, "a zip archive", "unpack it with unzip"},
    {"PAR1", 4, "a Parquet file",
     "encode its rows with scripts/encode_rows.py, or write its column of text as JSON lines of "
     "the "
     "form {\"text\": \"...\"}"},
    {"ARROW1", 6, "an Arrow file",
     "write its column of text as JSON lines of the form {\"text\": \"...\"}"},
    {"\x89PNG", 4, "a PNG image", "name a text"},
    {"%PDF-", 5, "a PDF document", "extract its text with pdftotext"},
    {"MMIDIDX", 7, "a Megatron index", "name the pair of .bin and .idx without the suffix"},
};

/* The magic number 0x184D2A50 to 0x184D2A5F: pzstd and seekable files begin with such a frame. */
static bool begins_skippable(const uint8_t *data, size_t size)
{
    return size >= MAGIC_BYTES && (data[0] & 0xf0) == 0x50 &&
           memcmp(data + 1, "\x2a\x4d\x18", 3) == 0;
}

const nd_file_kind *nd_file_kind_of(const void *data, size_t size)
{
    if (begins_skippable(data, size)) {
        return &kinds[1];
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (size >= kinds[i].size && memcmp(data, kinds[i].begin, kinds[i].size) == 0) {
            return &kinds[i];
        }
    }
    return NULL;
}

nd_status nd_text_check_encoding(const char *path, const uint8_t *data, size_t size)
{
    if (size < 2 ||
        !((data[0] == 0xff && data[1] == 0xfe) || (data[0] == 0xfe && data[1] == 0xff))) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" begins with the byte order mark of UTF-16 (%02X %02X); write it in "
                   "UTF-8, for example with iconv -f UTF-16 -t UTF-8",
                   path, data[0], data[1]);
}

static nd_status fill(nd_text_stream *s)
{
    ssize_t n;
    do {
        n = read(s->fd, s->in, IN_BYTES);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return nd_fail(ND_ERR_IO, "\"%s\" cannot be read: %s", s->path, strerror(errno));
    }
    s->at = 0;
    s->filled = (size_t)n;
    s->consumed += (uint64_t)n;
    return ND_OK;
}

/* An empty .gz is what a copy that failed leaves. */
static nd_status fail_short(const nd_text_stream *s)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" has %zu bytes, which is too short for compressed data: the file is "
                   "truncated; fetch it again, or take it out",
                   s->path, s->filled);
}

static nd_status begin(nd_text_stream *s)
{
    ND_TRY(fill(s));
    if (s->filled < MAGIC_BYTES &&
        (nd_ends_with(s->path, ".gz") || nd_ends_with(s->path, ".zst"))) {
        return fail_short(s);
    }
    const nd_file_kind *kind = nd_file_kind_of(s->in, s->filled);
    s->kind = kind == &kinds[0] ? GZIP : kind == &kinds[1] ? ZSTD : PLAIN;
    if (kind && s->kind == PLAIN) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is %s, not text; %s", s->path, kind->kind, kind->fix);
    }
    if (s->kind == GZIP && inflateInit2(&s->gzip, GZIP_ONLY) != Z_OK) {
        s->kind = PLAIN; /* nothing to end */
        return nd_fail_memory("reading \"%s\"", s->path);
    }
    if (s->kind == ZSTD) {
        s->zstd = ZSTD_createDStream();
        if (!s->zstd ||
            ZSTD_isError(ZSTD_DCtx_setParameter(s->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX))) {
            return nd_fail_memory("reading \"%s\"", s->path);
        }
    }
    return ND_OK;
}

nd_status nd_text_stream_open(const char *path, nd_text_stream **out)
{
    nd_text_stream *s;
    ND_TRY(ND_ALLOC(1, &s));
    s->fd = -1;
    nd_status status = nd_fs_format(&s->path, "%s", path);
    ND_TRY_OUT(status);
    ND_TRY_OUT(nd_alloc(IN_BYTES, 1, (void **)&s->in));
    ND_TRY_OUT(nd_fs_open(path, ND_ERR_DATA, &s->fd, NULL));
    ND_TRY_OUT(begin(s));
    *out = s;
    s = NULL;
out:
    nd_text_stream_close(s);
    return status;
}

void nd_text_stream_close(nd_text_stream *s)
{
    if (!s) {
        return;
    }
    if (s->kind == GZIP) {
        inflateEnd(&s->gzip);
    }
    ZSTD_freeDStream(s->zstd);
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->in);
    free(s->path);
    free(s);
}

uint64_t nd_text_stream_consumed(const nd_text_stream *s)
{
    return s->consumed - (s->filled - s->at);
}

/* `got`: bytes of text of the call that fails. */
static nd_status fail_cut(const nd_text_stream *s, size_t got)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" ends within its compressed data, after %llu bytes of text: the file is "
                   "truncated; fetch it again",
                   s->path, (unsigned long long)(s->produced + got));
}

static nd_status fail_damaged(const nd_text_stream *s, size_t got, const char *why)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" is damaged near byte %llu, after %llu bytes of text: %s; fetch the "
                   "file again",
                   s->path, (unsigned long long)nd_text_stream_consumed(s),
                   (unsigned long long)(s->produced + got), why);
}

static nd_status read_plain(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    while (*got < size) {
        if (s->at == s->filled) {
            ND_TRY(fill(s));
            if (s->filled == 0) {
                break;
            }
        }
        size_t n = s->filled - s->at < size - *got ? s->filled - s->at : size - *got;
        memcpy(out + *got, s->in + s->at, n);
        s->at += n;
        *got += n;
    }
    return ND_OK;
}

/* Between members: moves to the next one. Zeros may pad the file (tapes, blocks), as for gunzip. */
static nd_status begin_member(nd_text_stream *s)
{
    while (s->produced + s->gzip.total_in > 0 && s->at < s->filled && s->in[s->at] == 0) {
        s->at++;
    }
    if (s->at < s->filled) {
        inflateReset(&s->gzip);
        s->inside = true;
    }
    return ND_OK;
}

static nd_status read_gzip(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    while (*got < size) {
        if (s->at == s->filled) {
            ND_TRY(fill(s));
            if (s->filled == 0) {
                return s->inside ? fail_cut(s, *got) : ND_OK;
            }
        }
        if (!s->inside) {
            ND_TRY(begin_member(s));
            continue;
        }
        size_t room = size - *got < OUT_BYTES_MAX ? size - *got : OUT_BYTES_MAX;
        s->gzip.next_in = s->in + s->at;
        s->gzip.avail_in = (unsigned)(s->filled - s->at);
        s->gzip.next_out = out + *got;
        s->gzip.avail_out = (unsigned)room;
        int code = inflate(&s->gzip, Z_NO_FLUSH);
        s->at = s->filled - s->gzip.avail_in;
        *got += room - s->gzip.avail_out;
        if (code == Z_STREAM_END) {
            s->inside = false;
        } else if (code == Z_MEM_ERROR) {
            return nd_fail_memory("reading \"%s\"", s->path);
        } else if (code != Z_OK && code != Z_BUF_ERROR) {
            return fail_damaged(s, *got, s->gzip.msg ? s->gzip.msg : "it is no gzip data");
        }
    }
    return ND_OK;
}

static nd_status fail_zstd(const nd_text_stream *s, size_t got, size_t code)
{
    switch (ZSTD_getErrorCode(code)) {
    case ZSTD_error_memory_allocation:
        return nd_fail_memory("reading \"%s\"", s->path);
    case ZSTD_error_frameParameter_windowTooLarge:
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" was compressed with a window above %d MiB; compress it again "
                       "without --long, or with --long=%d",
                       s->path, (1 << WINDOW_LOG_MAX) >> 20, WINDOW_LOG_MAX);
    default:
        return fail_damaged(s, got, ZSTD_getErrorName(code));
    }
}

static nd_status read_zstd(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    while (*got < size) {
        if (s->at == s->filled) {
            ND_TRY(fill(s));
            if (s->filled == 0 && !s->inside) {
                break;
            }
        }
        ZSTD_inBuffer from = {s->in, s->filled, s->at};
        ZSTD_outBuffer to = {out, size, *got};
        size_t code = ZSTD_decompressStream(s->zstd, &to, &from);
        bool moved = from.pos > s->at || to.pos > *got;
        s->at = from.pos;
        *got = to.pos;
        if (ZSTD_isError(code)) {
            return fail_zstd(s, *got, code);
        }
        s->inside = code != 0;
        if (!moved) { /* at the end of the file nothing more comes out */
            return s->filled == 0 ? fail_cut(s, *got)
                                  : fail_damaged(s, *got, "it makes no progress");
        }
    }
    return ND_OK;
}

nd_status nd_text_stream_read(nd_text_stream *s, void *out, size_t size, size_t *got)
{
    *got = 0;
    if (s->kind == PLAIN) {
        ND_TRY(read_plain(s, out, size, got));
    } else {
        ND_TRY(s->kind == GZIP ? read_gzip(s, out, size, got) : read_zstd(s, out, size, got));
    }
    s->produced += *got;
    if (s->kind != PLAIN && s->produced > EXPANSION_FREE &&
        s->produced / EXPANSION_MAX > s->consumed) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" expands more than %d times, to %llu bytes so far; that is no text, "
                       "take the file out",
                       s->path, EXPANSION_MAX, (unsigned long long)s->produced);
    }
    return ND_OK;
}
