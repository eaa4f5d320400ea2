// SPDX-License-Identifier: Apache-2.0
#include "trainer/corpus/corpus.h"

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

struct nd_text_stream {
    char *path;
    int fd;
    nd_status (*decode)(nd_text_stream *s, uint8_t *out, size_t size, size_t *got);
    uint8_t *in; /* (IN_BYTES) */
    size_t at, filled;
    uint64_t consumed, produced;
    bool inside; /* a member or frame has begun and not ended */
    z_stream gzip;
    ZSTD_DStream *zstd;
};

/* Kinds of file that are not text, known by their first bytes; the first two are unpacked. */
static const struct file_kind {
    const char *begin;
    size_t size;
    const char *kind, *fix;
} kinds[] = {
    {"\x1f\x8b", 2, "compressed with gzip", "unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", 4, "compressed with zstd", "unpack it with unzstd"},
    {"\xfd"
     "7zXZ",
     5, "compressed with xz", "unpack it with unxz"},
    {"BZh91AY&SY", 10, "compressed with bzip2", "unpack it with bunzip2"},
    {"PK\x03\x04", 4, "a zip archive", "unpack it with unzip"},
    {"PAR1", 4, "a Parquet file",
     "encode its rows with scripts/encode_rows.py, or write its column of text as JSON lines of "
     "the form {\"text\": \"...\"}"},
    {"ARROW1", 6, "an Arrow file",
     "write its column of text as JSON lines of the form {\"text\": \"...\"}"},
    {"\x89PNG", 4, "a PNG image", "name a text"},
    {"%PDF-", 5, "a PDF document", "extract its text with pdftotext"},
    {"MMIDIDX", 7, "a Megatron index", "name the pair of .bin and .idx without the suffix"},
};

/* NULL: the bytes begin as no known kind does. Files of pzstd, and seekable ones, begin with a
 * skippable frame, whose magic number is 0x184D2A50 to 0x184D2A5F. */
static const struct file_kind *find_kind(const uint8_t *data, size_t size)
{
    if (size >= MAGIC_BYTES && (data[0] & 0xf0) == 0x50 &&
        memcmp(data + 1, "\x2a\x4d\x18", 3) == 0) {
        return &kinds[1];
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (size >= kinds[i].size && memcmp(data, kinds[i].begin, kinds[i].size) == 0) {
            return &kinds[i];
        }
    }
    return NULL;
}

nd_status nd_text_check(const char *path, const uint8_t *data, size_t size)
{
    const struct file_kind *kind = find_kind(data, size);
    if (kind) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is %s, not text; %s", path, kind->kind, kind->fix);
    }
    if (size >= 2 &&
        ((data[0] == 0xff && data[1] == 0xfe) || (data[0] == 0xfe && data[1] == 0xff))) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" begins with the byte order mark of UTF-16 (%02X %02X); write it in "
                       "UTF-8, for example with iconv -f UTF-16 -t UTF-8",
                       path, data[0], data[1]);
    }
    return ND_OK;
}

static nd_status fill_input(nd_text_stream *s)
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

uint64_t nd_text_stream_consumed(const nd_text_stream *s)
{
    return s->consumed - (s->filled - s->at);
}

static nd_status fail_damaged(const nd_text_stream *s, const char *why)
{
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" is damaged near byte %llu, after %llu bytes of text: %s; fetch the "
                   "file again",
                   s->path, (unsigned long long)nd_text_stream_consumed(s),
                   (unsigned long long)s->produced, why);
}

/* The decoders take some of the input, and give up to `size` bytes, which *got counts. */

static nd_status copy_plain(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    *got = s->filled - s->at < size ? s->filled - s->at : size;
    memcpy(out, s->in + s->at, *got);
    s->at += *got;
    return ND_OK;
}

/* Zeros may stand behind a member (tapes, blocks), as for gunzip. */
static nd_status decode_gzip(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    if (!s->inside) {
        while (s->produced + s->gzip.total_in > 0 && s->at < s->filled && s->in[s->at] == 0) {
            s->at++;
        }
        if (s->at == s->filled) {
            return ND_OK;
        }
        inflateReset(&s->gzip);
        s->inside = true;
    }
    const size_t room = size < OUT_BYTES_MAX ? size : OUT_BYTES_MAX;
    s->gzip.next_in = s->in + s->at;
    s->gzip.avail_in = (unsigned)(s->filled - s->at);
    s->gzip.next_out = out;
    s->gzip.avail_out = (unsigned)room;
    const int code = inflate(&s->gzip, Z_NO_FLUSH);
    s->at = s->filled - s->gzip.avail_in;
    *got = room - s->gzip.avail_out;
    s->inside = code != Z_STREAM_END;
    if (code == Z_MEM_ERROR) {
        return nd_fail_memory("reading \"%s\"", s->path);
    }
    return code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR
               ? ND_OK
               : fail_damaged(s, s->gzip.msg ? s->gzip.msg : "it is no gzip data");
}

static nd_status decode_zstd(nd_text_stream *s, uint8_t *out, size_t size, size_t *got)
{
    ZSTD_inBuffer from = {s->in, s->filled, s->at};
    ZSTD_outBuffer to = {out, size, 0};
    const size_t code = ZSTD_decompressStream(s->zstd, &to, &from);
    s->at = from.pos;
    *got = to.pos;
    s->inside = code != 0;
    switch (ZSTD_getErrorCode(code)) {
    case ZSTD_error_no_error:
        return ND_OK;
    case ZSTD_error_memory_allocation:
        return nd_fail_memory("reading \"%s\"", s->path);
    case ZSTD_error_frameParameter_windowTooLarge:
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" was compressed with a window above %d MiB; compress it again "
                       "without --long, or with --long=%d",
                       s->path, (1 << WINDOW_LOG_MAX) >> 20, WINDOW_LOG_MAX);
    default:
        return fail_damaged(s, ZSTD_getErrorName(code));
    }
}

static nd_status begin_decoding(nd_text_stream *s)
{
    ND_TRY(fill_input(s));
    if (s->filled < MAGIC_BYTES &&
        (nd_ends_with(s->path, ".gz") || nd_ends_with(s->path, ".zst"))) {
        /* An empty .gz is what a copy that failed leaves. */
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has %zu bytes, which is too short for compressed data: the file is "
                       "truncated; fetch it again, or take it out",
                       s->path, s->filled);
    }
    const struct file_kind *kind = find_kind(s->in, s->filled);
    if (kind == &kinds[0]) {
        if (inflateInit2(&s->gzip, GZIP_ONLY) != Z_OK) {
            return nd_fail_memory("reading \"%s\"", s->path);
        }
        s->decode = decode_gzip;
    } else if (kind == &kinds[1]) {
        s->zstd = ZSTD_createDStream();
        if (!s->zstd ||
            ZSTD_isError(ZSTD_DCtx_setParameter(s->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX))) {
            return nd_fail_memory("reading \"%s\"", s->path);
        }
        s->decode = decode_zstd;
    } else {
        s->decode = copy_plain;
        return nd_text_check(s->path, s->in, s->filled);
    }
    return ND_OK;
}

nd_status nd_text_stream_open(const char *path, nd_text_stream **out)
{
    nd_text_stream *s;
    ND_TRY(ND_ALLOC(1, &s));
    s->fd = -1;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&s->path, "%s", path));
    ND_TRY_OUT(nd_alloc(IN_BYTES, 1, (void **)&s->in));
    ND_TRY_OUT(nd_fs_open(path, ND_ERR_DATA, &s->fd, NULL));
    ND_TRY_OUT(begin_decoding(s));
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
    inflateEnd(&s->gzip); /* which may never have begun */
    ZSTD_freeDStream(s->zstd);
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->in);
    free(s->path);
    free(s);
}

nd_status nd_text_stream_read(nd_text_stream *s, void *out, size_t size, size_t *got)
{
    for (*got = 0; *got < size;) {
        if (s->at == s->filled) {
            ND_TRY(fill_input(s));
            if (s->filled == 0 && !s->inside) {
                break;
            }
        }
        const size_t at = s->at;
        size_t n = 0;
        nd_status status = s->decode(s, (uint8_t *)out + *got, size - *got, &n);
        *got += n;
        s->produced += n;
        ND_TRY(status);
        if (n == 0 && s->at == at) { /* at the end of the file nothing more comes out */
            return s->filled > 0
                       ? fail_damaged(s, "it makes no progress")
                       : nd_fail(ND_ERR_DATA,
                                 "\"%s\" ends within its compressed data, after %llu bytes of "
                                 "text: the file is truncated; fetch it again",
                                 s->path, (unsigned long long)s->produced);
        }
    }
    if (s->decode != copy_plain && s->produced > EXPANSION_FREE &&
        s->produced / EXPANSION_MAX > s->consumed) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" expands more than %d times, to %llu bytes so far; that is no text, "
                       "take the file out",
                       s->path, EXPANSION_MAX, (unsigned long long)s->produced);
    }
    return ND_OK;
}
