// SPDX-License-Identifier: Apache-2.0
/*
 * Text to ids: invalid bytes are replaced, added tokens are cut out of the raw text, each span
 * between them is normalised, the other added tokens are cut out of it, and what is left is split
 * into words for the merges.
 */
#include "trainer/text/bpe.h"
#include "trainer/text/unicode.h"

struct nd_encoder {
    const nd_tokenizer *tokenizer;
    nd_encode_options options;
    nd_encode_counts counts;
    nd_bpe_state bpe;
    nd_bytes valid;                       /* the text with invalid bytes replaced */
    nd_bytes rewrites[2];                 /* a span that is being normalised */
    nd_bytes spaced;                      /* a span with its marks or its blank before it */
    nd_regex *regexes[ND_TEXT_STEPS_MAX]; /* of splitters that are ND_SPLIT_REGEX */
    nd_ids ids;
};

nd_status nd_encoder_create(const nd_tokenizer *tokenizer, const nd_encode_options *options,
                            nd_encoder **out)
{
    nd_encoder *encoder;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &encoder));
    encoder->tokenizer = tokenizer;
    encoder->options = *options;
    ND_TRY_OUT(nd_bpe_init(&encoder->bpe, tokenizer, options->cache_bytes));
    for (int i = 0; i < tokenizer->splitter_count; i++) {
        const nd_bytes *pattern = &tokenizer->regexes[i];
        if (tokenizer->splitters[i] == ND_SPLIT_REGEX) {
            ND_TRY_OUT(nd_regex_create((const char *)pattern->data, pattern->count, tokenizer->name,
                                       ND_REGEX_SECONDS, &encoder->regexes[i]));
        }
    }
    *out = encoder;
    encoder = NULL;
out:
    nd_encoder_destroy(encoder);
    return status;
}

void nd_encoder_destroy(nd_encoder *encoder)
{
    if (!encoder) {
        return;
    }
    nd_bpe_fini(&encoder->bpe);
    for (int i = 0; i < ND_TEXT_STEPS_MAX; i++) {
        nd_regex_destroy(encoder->regexes[i]);
    }
    free(encoder->valid.data);
    free(encoder->rewrites[0].data);
    free(encoder->rewrites[1].data);
    free(encoder->spaced.data);
    free(encoder->ids.data);
    free(encoder);
}

const nd_encode_counts *nd_encoder_counts(const nd_encoder *encoder)
{
    return &encoder->counts;
}

void nd_encoder_set_counts(nd_encoder *encoder, const nd_encode_counts *counts)
{
    encoder->counts = *counts;
    encoder->bpe.dropped = counts->dropped;
    encoder->bpe.unknown = counts->unknown;
}

/* Checks the size of a text, or of one that was replaced or normalised: its places have 32 bits. */
static nd_status check_size(size_t size)
{
    return size <= ND_ENCODE_TEXT_BYTES_MAX
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "a text has %zu bytes, but at most %d are encoded at once; split it", size,
                         ND_ENCODE_TEXT_BYTES_MAX);
}

/* Words. */

static nd_status fail_dropped(const nd_encoder *encoder)
{
    const uint8_t *p = encoder->bpe.dropped_at;
    if (encoder->tokenizer->byte_level) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has no piece for the byte 0x%02x of a text and no unknown token; "
                       "ndtrain tokenize --drop-unknown leaves such characters out",
                       encoder->tokenizer->name, *p);
    }
    return nd_fail(ND_ERR_DATA,
                   "\"%s\" has no piece for the character U+%04X of a text and no unknown token; "
                   "ndtrain tokenize --drop-unknown leaves such characters out",
                   encoder->tokenizer->name, nd_char_at(p).code);
}

/* Up to ND_BPE_WORDS words that follow one another. */
static nd_status encode_words(nd_encoder *encoder, const uint8_t *text, size_t size, size_t begin,
                              const size_t *ends, int count)
{
    ND_TRY(nd_bpe_words(&encoder->bpe, text, size, begin, ends, count, &encoder->ids));
    return encoder->bpe.dropped_at && !encoder->options.drop_unknown ? fail_dropped(encoder)
                                                                     : ND_OK;
}

/* A text that no pattern splits is one word for the merges. It is cut wherever that changes
 * nothing, so that its words are found in the cache. The loop has no branch that depends on where
 * that is: the next end is written at each byte, and overwritten if it is none. */
static nd_status encode_cut(nd_encoder *encoder, const uint8_t *text, size_t size)
{
    const nd_bpe *bpe = &encoder->tokenizer->bpe;
    size_t ends[ND_BPE_WORDS], begin = 0;
    int count = 0, left = nd_text_class_at(text, size);
    for (size_t at = 1; bpe->cuts && at < size; at++) {
        const bool inside = (text[at] & 0xc0) == 0x80; /* of a character */
        const int right = inside ? left : nd_text_class_at(text + at, size - at);
        ends[count] = at;
        count += !inside & bpe->apart[left][right];
        left = right;
        if (count == ND_BPE_WORDS) {
            ND_TRY(encode_words(encoder, text, size, begin, ends, count));
            begin = at;
            count = 0;
        }
    }
    ends[count++] = size;
    return encode_words(encoder, text, size, begin, ends, count);
}

/* The next words by the splitter of a step; `at` is 0, or where the last of them ended. */
static nd_status next_words(nd_encoder *encoder, int step, const uint8_t *text, size_t size,
                            size_t at, size_t *ends, int *count)
{
    nd_regex *regex = encoder->regexes[step];
    if (!regex) {
        *count =
            nd_text_words(encoder->tokenizer->splitters[step], text, size, at, ends, ND_BPE_WORDS);
        return ND_OK;
    }
    ND_TRY(at == 0 ? nd_regex_begin(regex, text, size) : ND_OK);
    *count = nd_regex_words(regex, ends, ND_BPE_WORDS);
    return ND_OK;
}

/* Splits by the splitters from `step` on. */
static nd_status encode_split(nd_encoder *encoder, int step, const uint8_t *text, size_t size)
{
    const nd_tokenizer *tokenizer = encoder->tokenizer;
    size_t ends[ND_BPE_WORDS];
    if (tokenizer->splitter_count == 0 || tokenizer->bpe.cuts) {
        return encode_cut(encoder, text, size);
    }
    for (size_t at = 0; at < size;) {
        int count;
        ND_TRY(next_words(encoder, step, text, size, at, ends, &count));
        if (step + 1 == tokenizer->splitter_count) {
            ND_TRY(encode_words(encoder, text, size, at, ends, count));
            at = ends[count - 1];
        }
        for (int i = 0; step + 1 < tokenizer->splitter_count && i < count; i++) {
            ND_TRY(encode_split(encoder, step + 1, text + at, ends[i] - at));
            at = ends[i];
        }
    }
    return ND_OK;
}

/* Spans between added tokens. */

/* Metaspace: blanks become marks, and one goes before the text as its scheme says. */
static nd_status add_marks(nd_encoder *encoder, const uint8_t *text, size_t size, bool first)
{
    const nd_metaspace scheme = encoder->tokenizer->metaspace;
    bool wanted = scheme == ND_METASPACE_ALWAYS || (scheme == ND_METASPACE_FIRST && first);
    if (wanted && text[0] != ' ' && nd_text_class_at(text, size) != ND_TEXT_CLASS_MARK) {
        ND_TRY(nd_bytes_add(&encoder->spaced, ND_TEXT_MARK, ND_TEXT_MARK_BYTES));
    }
    for (size_t at = 0; at < size;) {
        const uint8_t *blank = memchr(text + at, ' ', size - at);
        size_t end = blank ? (size_t)(blank - text) : size;
        ND_TRY(nd_bytes_add(&encoder->spaced, text + at, end - at));
        if (blank) {
            ND_TRY(nd_bytes_add(&encoder->spaced, ND_TEXT_MARK, ND_TEXT_MARK_BYTES));
        }
        at = end + 1;
    }
    return ND_OK;
}

/* A normalised span of `size` > 0 bytes without added tokens. `first`: the text begins with it. */
static nd_status encode_plain(nd_encoder *encoder, const uint8_t *text, size_t size, bool first)
{
    const nd_tokenizer *tokenizer = encoder->tokenizer;
    nd_bytes *spaced = &encoder->spaced;
    spaced->count = 0;
    if (tokenizer->metaspace != ND_METASPACE_NONE) {
        ND_TRY(add_marks(encoder, text, size, first));
    } else if (tokenizer->prefix_blank && text[0] != ' ') {
        ND_TRY(nd_bytes_add(spaced, " ", 1));
        ND_TRY(nd_bytes_add(spaced, text, size));
    }
    text = spaced->count > 0 ? spaced->data : text;
    size = spaced->count > 0 ? spaced->count : size;
    ND_TRY(check_size(size));
    return encode_split(encoder, 0, text, size);
}

/* Cuts added tokens out of a text and gives each span between them to `encode`. */
typedef nd_status encode_span(nd_encoder *encoder, const uint8_t *text, size_t size, bool first);

static nd_status encode_between(nd_encoder *encoder, nd_added_scan scan, bool first,
                                encode_span *encode)
{
    const uint8_t *text = scan.text;
    size_t done = 0;
    nd_added_match match;
    while (nd_added_next(&scan, &match)) {
        if (match.token->special && encoder->options.special_in_text == ND_SPECIAL_REFUSE) {
            return nd_fail(
                ND_ERR_DATA,
                "the text has the special token \"%.*s\" at byte %zu; set "
                "data.special_in_text (--special-in-text) to text or parse, or take it out",
                (int)match.token->size, (const char *)match.token->pattern, match.begin);
        }
        if (match.begin > done) {
            ND_TRY(encode(encoder, text + done, match.begin - done, first && done == 0));
        }
        ND_TRY(nd_ids_add(&encoder->ids, &match.token->id, 1));
        done = match.end;
    }
    encoder->counts.special += scan.special;
    return done < scan.size ? encode(encoder, text + done, scan.size - done, first && done == 0)
                            : ND_OK;
}

static nd_added_scan scan_of(const nd_encoder *encoder, const nd_added_set *set,
                             const uint8_t *text, size_t size)
{
    return (nd_added_scan){.set = set,
                           .text = text,
                           .size = size,
                           .skip_special = encoder->options.special_in_text == ND_SPECIAL_TEXT};
}

static nd_status encode_raw(nd_encoder *encoder, const uint8_t *text, size_t size, bool first)
{
    const nd_tokenizer *tokenizer = encoder->tokenizer;
    ND_TRY(nd_text_rewrite(tokenizer->rewrites, tokenizer->rewrite_count, text, size,
                           encoder->rewrites, &text, &size));
    ND_TRY(check_size(size));
    return size == 0 ? ND_OK
                     : encode_between(encoder, scan_of(encoder, &tokenizer->normalized, text, size),
                                      first, encode_plain);
}

/* Texts. */

nd_status nd_encode(nd_encoder *encoder, const char *text, size_t size, const int32_t **ids,
                    size_t *count)
{
    return nd_encode_part(encoder, text, size, true, true, ids, count);
}

nd_status nd_encode_part(nd_encoder *encoder, const char *text, size_t size, bool begins, bool ends,
                         const int32_t **ids, size_t *count)
{
    const nd_tokenizer *tokenizer = encoder->tokenizer;
    const bool post = encoder->options.post_process;
    const uint8_t *p = (const uint8_t *)text;
    size_t used;
    ND_TRY(check_size(size));
    encoder->counts.bytes += (int64_t)size;
    const size_t valid = nd_utf8_valid(p, size);
    if (valid < size && encoder->options.refuse_invalid) {
        return nd_fail(ND_ERR_DATA,
                       "the text is not UTF-8 from byte %zu (0x%02x) on; repair the "
                       "text, or put U+FFFD there with --invalid-utf8 replace (data.invalid_utf8)",
                       valid, p[valid]);
    }
    if (valid < size) {
        encoder->valid.count = 0;
        ND_TRY(nd_text_repair(p, size, true, &encoder->valid, &used, &encoder->counts.invalid));
        p = encoder->valid.data;
        size = encoder->valid.count;
        ND_TRY(check_size(size));
    }
    encoder->ids.count = 0;
    ND_TRY(nd_ids_add(&encoder->ids, tokenizer->before,
                      post && begins ? (size_t)tokenizer->before_count : 0));
    if (size > 0) {
        ND_TRY(encode_between(encoder, scan_of(encoder, &tokenizer->raw, p, size), begins,
                              encode_raw));
    }
    ND_TRY(nd_ids_add(&encoder->ids, tokenizer->behind,
                      post && ends ? (size_t)tokenizer->behind_count : 0));
    encoder->counts.dropped = encoder->bpe.dropped;
    encoder->counts.unknown = encoder->bpe.unknown;
    *ids = encoder->ids.data;
    *count = encoder->ids.count;
    return ND_OK;
}
