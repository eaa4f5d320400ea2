// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CORPUS_CORPUS_H
#define ND_CORPUS_CORPUS_H
/*
 * A corpus: files of text that become one array of tokens, with the ends of documents and what does
 * not count in the loss.
 *
 * A reader cuts the files into blocks; threads take a block each, encode it, and give it to a sink
 * in the order of the files. Where blocks begin does not depend on the number of threads, and the
 * ids do not depend on where blocks begin: the output is the same for any number of threads. Memory
 * is a few blocks for each thread.
 *
 * A document is a line of JSON, a file of text, or what stands between two separators in one.
 */
#include <jansson.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "runtime/config/config.h"
#include "trainer/text/buffer.h"
#include "trainer/text/tokenizer.h"

/* Files. */

typedef struct nd_corpus_file {
    char *path;
    bool rows; /* JSON lines, else text */
    uint64_t bytes;
} nd_corpus_file;

typedef struct nd_corpus_files {
    nd_corpus_file *list;
    size_t count, room;
    uint64_t bytes;  /* of all */
    int64_t skipped; /* files of folders that are of no known kind */
    int64_t folders; /* within folders, or named by a pattern; what is in them is left out */
    char *text;      /* the first one beside files of token ids; NULL: there is none */
} nd_corpus_files;

/*
 * Adds a file; the files of a folder that end in .jsonl, .ndjson or .txt, also with .gz or .zst
 * behind; or what a pattern with * ? [ names. Folders and patterns give their files in bytewise
 * order of the names. `format` auto: JSON lines by the ending, else text, but a file of another
 * ending than .txt that begins as JSON does is refused: nd_corpus_check_text. ND_ERR_DATA when
 * there is none, one cannot be read, or a pattern meets a folder that cannot be read.
 */
nd_status nd_corpus_files_add(nd_corpus_files *files, const char *path, nd_data_format format);
/* Adds the files of token ids, which end in .bin, of a folder or a pattern, in the same order. None
 * is no error. What else stands there is noted, but for the .idx and .mask of a .bin. */
nd_status nd_corpus_files_add_tokens(nd_corpus_files *files, const char *path);
/* A file that is taken for text because no format is given: ND_ERR_DATA when there is a NUL among
 * its first 4096 bytes, as in any program, array or model, or when its name and its first bytes say
 * that it is JSON. */
nd_status nd_corpus_check_text(const char *path);
/* Logs that files and folders of a folder or a pattern are not read, when there are some. */
void nd_corpus_files_say_left_out(const nd_corpus_files *files, const char *path);
void nd_corpus_files_fini(nd_corpus_files *files); /* an all-zero one is legal */
/* Finds whether nd_corpus_files_add would take a path for a folder or a pattern. */
nd_status nd_corpus_is_several(const char *path, bool *out);

/*
 * The bytes of a file of text, which may be compressed: plain, gzip (members one after another) or
 * zstd (frames one after another, also skippable ones). The first bytes decide, not the name; but a
 * file named .gz or .zst that is too short for either is refused as truncated. Blocking; one thread
 * at a time uses a stream. Memory is bounded: a zstd window above 128 MiB is refused, and so is a
 * file that expands more than a thousand times.
 */
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

/* Documents and rules. */

typedef struct nd_chat_template nd_chat_template; /* chat.h */

/* Rules by which "messages" become one text with control tokens. */
typedef struct nd_chat_rules {
    const nd_chat_template *template; /* NULL: not at all */
    char bos[64], eos[64];            /* of the tokenizer_config.json; "": there is none */
    bool foreign;                     /* the template beside the tokenizer is another one */
} nd_chat_rules;

typedef struct nd_corpus_rules {
    nd_special_in_text special_in_text;
    bool add_special;     /* what the post-processor adds to each document */
    bool append_eod;      /* end each document with the tokenizer's end of text */
    bool refuse_invalid;  /* invalid UTF-8 is an error, else it is replaced by U+FFFD */
    bool drop_unknown;    /* characters without a piece are left out, else they are an error */
    const char *json_key; /* "text"; borrowed, as all strings here */
    bool pairs; /* rows may have "prompt" and "completion" instead; prompts do not count in the loss
                   (spans), and the two are encoded one by one */
    nd_chat_rules chat; /* with pairs: rows may have "messages" instead, of which only the turns of
                           the assistant count */
    const char *separator; /* of documents in files of text; NULL: a file is one document */
    size_t separator_size;
} nd_corpus_rules;

/* Sets rules->separator to a text in which \n, \r, \t and \\ stand for one character each.
 * *out: what the rules borrow; the caller frees it. */
nd_status nd_corpus_separator(const char *text, nd_corpus_rules *rules, char **out);

/* The tokenizer_config.json in a folder; *out: owned by the caller, NULL where there is none. */
nd_status nd_tokenizer_config_read(const char *folder, json_t **out);
/* A token that it names under this key; NULL: none. */
const char *nd_tokenizer_config_token(const json_t *config, const char *key);

/* The id that ends a document: eos_token of the tokenizer_config.json in the folder of `path`, or
 * else <|end_of_text|>, <|endoftext|> or </s>. ND_ERR_DATA when there is none. */
nd_status nd_corpus_eod(const nd_tokenizer *tokenizer, const char *path, int32_t *id);
/* Like nd_corpus_eod, for models whose files name no end of text: -1, without an error, if none is
 * found, the tokenizer cannot be read, or the id is >= `vocab`. `tokenizer` NULL: `path`'s own. */
int32_t nd_corpus_model_end(const nd_tokenizer *tokenizer, const char *path, int64_t vocab);

/* Encoding. */

/* Positions count from the first token of the piece. */
typedef struct nd_corpus_piece {
    nd_ids ids;
    nd_ids ends;  /* ends of documents: tokens before it */
    nd_ids spans; /* pairs: tokens [begin, end) that do not count */
} nd_corpus_piece;

typedef struct nd_corpus_counts {
    nd_encode_counts text;
    int64_t documents; /* written */
    int64_t empty;     /* documents without text, which are left out */
    int64_t bad;       /* rows left out by skip_bad */
    int64_t lone;      /* halves of surrogate pairs, each replaced by U+FFFD */
    int64_t doubled;   /* documents that begin with the beginning of sequence twice */
    char stray[48];    /* the first key of a message that nothing reads, cut; "": there is none */
    int64_t tokens;
    int64_t ignored; /* tokens that do not count in the loss */
} nd_corpus_counts;

typedef struct nd_corpus_job {
    const nd_corpus_files *files;
    const nd_corpus_rules *rules;
    const nd_tokenizer *tokenizer;
    int32_t eod; /* -1: none */
    int threads; /* >= 1 */
    int64_t skip_bad;
    size_t block_bytes;      /* 0: a good size */
    const atomic_bool *stop; /* ends the work with ND_ERR_PREEMPTED; NULL: nothing does */
    void *context;
    /* Takes the next piece, which ends behind so many bytes of the files; on one thread at a time,
     * in order. */
    nd_status (*write)(void *context, const nd_corpus_piece *piece, uint64_t bytes);
} nd_corpus_job;

/* ND_ERR_DATA names file and line, or says that none of the tokens counts in the loss;
 * ND_ERR_CANTCREATE or what else `write` gives. */
nd_status nd_corpus_encode(const nd_corpus_job *job, nd_corpus_counts *counts);

/* CPUs that this process may use, at most 64: a good number of threads. */
int nd_corpus_threads(void);

#endif
