// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_STREAM_H
#define ND_CORPUS_STREAM_H
/*
 * The bytes of a file of text, which may be compressed: plain, gzip (members one after another) or
 * zstd (frames one after another, also skippable ones). The first bytes decide, not the name; but a
 * file named .gz or .zst that is too short for either is refused as truncated. Blocking; one thread
 * at a time uses a stream. Memory is bounded: a zstd window above 128 MiB is refused, and so is a
 * file that expands more than a thousand times.
 */
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_text_stream nd_text_stream;

/* ND_ERR_DATA for a file that is missing, no regular file, or that nd_text_check refuses. */
nd_status nd_text_stream_open(const char *path, nd_text_stream **out);
void nd_text_stream_close(nd_text_stream *stream); /* NULL is legal */
/* Up to `size` bytes; *got is less only at the end. ND_ERR_DATA names a file that is cut or
 * damaged, ND_ERR_IO a device that fails. */
nd_status nd_text_stream_read(nd_text_stream *stream, void *out, size_t size, size_t *got);
/* Bytes of the file itself that were read so far. */
uint64_t nd_text_stream_consumed(const nd_text_stream *stream);

/* Looks at the first bytes of what is taken for text. ND_ERR_DATA: they are those of a compressed
 * file, an archive, an image and the like, or the byte order mark of UTF-16, as no UTF-8 begins. */
nd_status nd_text_check(const char *path, const uint8_t *data, size_t size);

#endif
