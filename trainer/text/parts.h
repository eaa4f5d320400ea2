// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TEXT_PARTS_H
#define ND_TEXT_PARTS_H
/*
 * A tokenizer and its parts. tokenizer.c and read_*.c fill it from the file; normalize.c,
 * split.c, bpe.c, encode.c and decode.c each read the part that is theirs.
 */
#include "trainer/text/added.h"
#include "trainer/text/buffer.h"
#include "trainer/text/regex.h"
#include "trainer/text/tokenizer.h"
#include "trainer/text/vocab.h"

/* U+2581, which stands for a blank in the pieces of SentencePiece-like files. */
#define ND_TEXT_MARK "\xe2\x96\x81"
enum { ND_TEXT_MARK_BYTES = 3 };

/* One step of the normalizer: puts `to` before a text with a character, replaces each `from`, or
 * composes characters (Unicode's normal form C). */
typedef struct nd_rewrite {
    bool compose;
    char *from, *to; /* from NULL: put before */
    size_t from_size, to_size;
} nd_rewrite;

typedef enum nd_metaspace {
    ND_METASPACE_NONE = 0, /* there is no Metaspace */
    ND_METASPACE_NEVER,    /* blanks become marks, nothing is put before */
    ND_METASPACE_FIRST,    /* and a mark goes before the text at its beginning */
    ND_METASPACE_ALWAYS,   /* and a mark goes before each text between added tokens */
} nd_metaspace;

/* Ways to cut a text into words, applied one after another. */
typedef enum nd_splitter {
    ND_SPLIT_GPT2 = 0,
    ND_SPLIT_LLAMA3, /* numbers in threes */
    ND_SPLIT_QWEN2,  /* the same with single digits */
    ND_SPLIT_EACH_DIGIT,
    ND_SPLIT_DIGITS, /* runs of digits */
    ND_SPLIT_MARKS,  /* a word begins at each mark */
    ND_SPLIT_REGEX,  /* at the matches of a pattern without a scanner */
} nd_splitter;

typedef enum nd_decoder_kind {
    ND_DECODER_NONE = 0,
    ND_DECODER_BYTE_LEVEL,
    ND_DECODER_METASPACE,
    ND_DECODER_SEQUENCE, /* replace, then byte tokens, then join, then strip */
} nd_decoder_kind;

enum { ND_TEXT_STEPS_MAX = 8, ND_TEXT_AFFIX_MAX = 64 };

/* Classes of characters by which a text without a pattern is cut into words: those of ASCII, the
 * mark, and all others. */
enum { ND_TEXT_CLASS_MARK = 128, ND_TEXT_CLASS_OTHER, ND_TEXT_CLASSES };

/* The class of the character that begins at a place; `left` >= 1 bytes can be read. */
static inline int nd_text_class_at(const uint8_t *p, size_t left)
{
    const uint8_t *mark = (const uint8_t *)ND_TEXT_MARK;
    if (*p < 0x80) {
        return *p;
    }
    const bool is_mark =
        left >= ND_TEXT_MARK_BYTES && ((p[0] ^ mark[0]) | (p[1] ^ mark[1]) | (p[2] ^ mark[2])) == 0;
    return is_mark ? ND_TEXT_CLASS_MARK : ND_TEXT_CLASS_OTHER;
}

typedef struct nd_bpe {
    bool ignore_merges, fuse_unknown;
    bool cuts; /* `apart` is used in place of the splitters */
    /* No ids change when a text is cut between characters of these classes: no merge joins them. */
    bool apart[ND_TEXT_CLASSES][ND_TEXT_CLASSES];
    int32_t unknown;    /* -1: none */
    bool fallback;      /* a character without a piece becomes its bytes, where all have pieces */
    int32_t bytes[256]; /* pieces of bytes, by either spelling; -1: none */
    /* Pieces that a word begins with: of each byte in a byte-level vocabulary, else of each ASCII
     * character; -1: none. */
    int32_t first[256];
} nd_bpe;

/* The places where a text may be cut, so that its parts have the ids of the whole. */
typedef enum nd_cut {
    ND_CUT_NOWHERE = 0,
    ND_CUT_BEFORE_BLANKS, /* before white space that does not follow white space */
    ND_CUT_AFTER_NEWLINE, /* behind a newline that no white space follows */
} nd_cut;

struct nd_tokenizer {
    char *name;
    nd_cut cut;
    nd_vocab vocab;
    nd_merges merges;
    nd_rewrite rewrites[ND_TEXT_STEPS_MAX];
    int rewrite_count;
    nd_metaspace metaspace;
    bool byte_level, prefix_blank;
    nd_splitter splitters[ND_TEXT_STEPS_MAX];
    nd_bytes regexes[ND_TEXT_STEPS_MAX]; /* patterns of those that are ND_SPLIT_REGEX */
    int splitter_count;
    nd_bpe bpe;
    nd_added *added; /* in the order of the file */
    int added_count;
    bool *special;                /* [vocab.size]: of each id */
    nd_bytes patterns;            /* of the added tokens that are normalised */
    nd_added_set raw, normalized; /* searched before and after normalisation */
    int32_t before[ND_TEXT_AFFIX_MAX], behind[ND_TEXT_AFFIX_MAX]; /* by the post-processor */
    int before_count, behind_count;
    nd_decoder_kind decoder;
    bool decoder_has_metaspace_prefix;      /* METASPACE: the first token loses its marks */
    nd_rewrite replaces[ND_TEXT_STEPS_MAX]; /* SEQUENCE */
    int replace_count;
    bool byte_fallback;
    char strip[4]; /* the character that is taken off the front */
    size_t strip_size;
    int64_t strip_count;
};

/* Appends the valid characters of a text, and U+FFFD for each invalid sequence of bytes, which
 * *replaced counts. A character that the end cuts is invalid too, if `whole`, or else left out:
 * *used bytes were taken. */
nd_status nd_text_repair(const uint8_t *text, size_t size, bool whole, nd_bytes *out, size_t *used,
                         int64_t *replaced);
/* Appends the normal form C of a valid text; in linear time. */
nd_status nd_text_normal_form(const uint8_t *text, size_t size, nd_bytes *out);
/* Applies the steps to a text. *out is the text itself or lies in one of the two buffers. */
nd_status nd_text_rewrite(const nd_rewrite *steps, int count, const uint8_t *text, size_t size,
                          nd_bytes buffers[2], const uint8_t **out, size_t *out_size);

/* Finds `cut` from what else has been read of a tokenizer; that takes longer than a cut. */
nd_cut nd_text_find_cut(const nd_tokenizer *tokenizer);

/* The regular expression that has this scanner. */
const char *nd_text_pattern(nd_splitter splitter);
/* The ends of up to `room` words that begin at `at` and follow one another; returns their number,
 * at least 1; `size` > `at`. Each call takes time in proportion to the words and what follows up to
 * the next border. ND_SPLIT_REGEX is not one of these splitters: see regex.h. */
int nd_text_words(nd_splitter splitter, const uint8_t *text, size_t size, size_t at, size_t *ends,
                  int room);

/*
 * Words by the patterns of Llama 3 and Qwen 2 in ASCII text, 64 bytes at once, with vector
 * instructions and 64-bit masks that have a bit for each byte. What the masks do not tell is left
 * to the scanner of split.c: characters that are not ASCII, and what depends on bytes behind the
 * block.
 */
enum { ND_SPLIT_BLOCK = 64 };

#endif
