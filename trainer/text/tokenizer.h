// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_TOKENIZER_H
#define ND_TEXT_TOKENIZER_H
/*
 * Hugging Face's tokenizer.json of the BPE families: text to ids and back, with the ids that the
 * package `tokenizers` gives.
 *
 * A tokenizer is what a file says. It does not change after it was opened, so any number of
 * threads may use one. An encoder and a decoder hold the buffers of one thread. Results are lent
 * until the next call on the same object.
 *
 * Understood: model BPE; normalizer NFC, Prepend, Replace (of a string), Sequence; pre-tokenizer
 * ByteLevel, Split with the patterns of GPT-2, Llama 3 and Qwen 2 or with another one that
 * Oniguruma reads, Digits, Metaspace, Sequence;
 * post-processor ByteLevel, TemplateProcessing, Sequence; decoder ByteLevel, Metaspace, and a
 * Sequence of Replace, ByteFallback, Fuse and Strip. Anything else is refused by its name, with
 * ND_ERR_DATA: Unigram, WordPiece, dropout, affixes of pieces, an added
 * token whose stated id is not the one that `tokenizers` would give it. Truncation and padding
 * are ignored, and the log says so. Character classes are those of the installed utf8proc.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_tokenizer nd_tokenizer;

nd_status nd_tokenizer_open(const char *path, nd_tokenizer **out);
/* Reads it from memory; `name` is for messages. */
nd_status nd_tokenizer_parse(const char *json, size_t size, const char *name, nd_tokenizer **out);
/*
 * The tokenizer whose ids are bytes: byte-level BPE without merges, whose vocabulary maps the
 * character that stands for byte b to id b.
 */
nd_status nd_byte_tokenizer_create(nd_tokenizer **out);
/* Its tokenizer.json; owned by the caller. */
nd_status nd_byte_tokenizer_text(bool indented, char **out);
void nd_tokenizer_close(nd_tokenizer *tokenizer); /* NULL is legal */

/* One more than the greatest id: what a model's vocab_size must hold. */
int32_t nd_tokenizer_vocab_size(const nd_tokenizer *tokenizer);
/* The id of a piece or added token as the file writes it, or -1. */
int32_t nd_tokenizer_find(const nd_tokenizer *tokenizer, const char *token, size_t size);
/* The token of an id as the file writes it, with a closing NUL; NULL when no token has this id. */
const char *nd_tokenizer_token(const nd_tokenizer *tokenizer, int32_t id, size_t *size);
/* True for an added token with `special`. Decoding may leave it out, unless normalisation
 * changes its text: there we do what `tokenizers` does. */
bool nd_tokenizer_is_special(const nd_tokenizer *tokenizer, int32_t id);

/* True when the ids of a whole text begin with the special token that the post-processor adds, and
 * then with the same one again, which came from the text. */
bool nd_tokenizer_begins_twice(const nd_tokenizer *tokenizer, const int32_t *ids, size_t count);

/* Text that contains the writing of a special added token, as "<|eot_id|>". */
typedef enum nd_special_in_text {
    ND_SPECIAL_TEXT = 0, /* it is text like any other: right for a corpus */
    ND_SPECIAL_PARSE,    /* it becomes the token, as `tokenizers` does by default */
    ND_SPECIAL_REFUSE,   /* ND_ERR_DATA with the token and where it stands */
} nd_special_in_text;

typedef struct nd_encode_options {
    nd_special_in_text special_in_text;
    bool post_process;   /* add what the post-processor adds: the beginning of sequence */
    bool refuse_invalid; /* invalid UTF-8 is ND_ERR_DATA; else U+FFFD, as Python's "replace" does */
    bool drop_unknown;   /* drop characters that have no piece, as `tokenizers` does; else
                            ND_ERR_DATA */
    size_t cache_bytes;  /* of words already merged; 0: no cache */
} nd_encode_options;

/* Counts of what an encoder has seen since it was created. */
typedef struct nd_encode_counts {
    int64_t bytes;
    int64_t invalid; /* invalid sequences of bytes, each replaced by one U+FFFD */
    int64_t dropped; /* characters without a piece; in a byte-level vocabulary, bytes */
    int64_t unknown; /* times that the unknown token was written */
    int64_t special; /* special added tokens met in the text, whatever became of them */
} nd_encode_counts;

typedef struct nd_encoder nd_encoder;

enum { ND_ENCODE_CACHE_BYTES = 8 << 20 };    /* a good default */
enum { ND_ENCODE_TEXT_BYTES_MAX = 1 << 30 }; /* of one text, also when it is normalised */

/* The tokenizer is borrowed until the encoder is destroyed. */
nd_status nd_encoder_create(const nd_tokenizer *tokenizer, const nd_encode_options *options,
                            nd_encoder **out);
void nd_encoder_destroy(nd_encoder *encoder); /* NULL is legal */
/*
 * One whole text. *ids has *count ids and is lent until the next call. The time is
 * O(size log size) at worst. After a failure the encoder can be used again.
 */
nd_status nd_encode(nd_encoder *encoder, const char *text, size_t size, const int32_t **ids,
                    size_t *count);
/* A part of a text: what the post-processor adds before the text comes with its beginning, what it
 * adds behind with its end. */
nd_status nd_encode_part(nd_encoder *encoder, const char *text, size_t size, bool begins, bool ends,
                         const int32_t **ids, size_t *count);
const nd_encode_counts *nd_encoder_counts(const nd_encoder *encoder);
/* Back to counts of an earlier moment: what was encoded since then was given up. */
void nd_encoder_set_counts(nd_encoder *encoder, const nd_encode_counts *counts);

/* The last place within a long text, which may hold invalid bytes, where it may be cut so that the
 * ids of its parts are those of the whole; 0: there is none. It depends on the splitting into words
 * and on the added tokens. */
size_t nd_text_cut(const nd_tokenizer *tokenizer, const char *text, size_t size);

typedef struct nd_decoder nd_decoder;

/* The tokenizer is borrowed until the decoder is destroyed. ND_ERR_DATA: its file has none. */
nd_status nd_decoder_create(const nd_tokenizer *tokenizer, bool skip_special, nd_decoder **out);
void nd_decoder_destroy(nd_decoder *decoder); /* NULL is legal */
/*
 * Adds ids. *text is what they complete, *size bytes of valid UTF-8, lent until the next call; it
 * may be empty. Held back are the beginning of a character that later ids may complete and, where
 * the file has ByteFallback, a run of byte tokens: one bad byte changes the whole run. All that is
 * given, with what nd_decoder_end gives, is the same however the ids are cut into calls.
 * ND_ERR_DATA for an id that no token has.
 */
nd_status nd_decoder_push(nd_decoder *decoder, const int32_t *ids, size_t count, const char **text,
                          size_t *size);
/* Gives the run of byte tokens that is held back, as if no further one belonged to it. The next
 * token is not the first of a text. */
nd_status nd_decoder_end_run(nd_decoder *decoder, const char **text, size_t *size);
/* Gives what was held back; the decoder is then as new. */
nd_status nd_decoder_end(nd_decoder *decoder, const char **text, size_t *size);

/* A part of the names of token caches. Raise it with each change that gives a text other ids than
 * before: of the tokenizer, of the rows and blocks of a corpus, of the forms of chats. */
enum { ND_TEXT_VERSION = 5 };

#endif
