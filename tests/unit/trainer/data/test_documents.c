// SPDX-License-Identifier: Apache-2.0
/* Separate documents in blocks of every kind of data, and blocks of whole rows. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"
#include "trainer/context/deal.h"

enum { S = 8, TOKENS = 200, END = 7, ROWS = 60, TEXT_MAX = 1 << 14 };

static tempdir dir;

TEMPDIR_SUITE(documents, tempdir_leave_empty);

static char prefix[PATH_MAX]; /* of token files */

static const nd_document_rules automatic = {.end_of_text = -1, .model_end = -1};
static const nd_document_rules separate = {
    .rule = ND_DOCUMENTS_SEPARATE, .end_of_text = -1, .model_end = -1};

/* Documents whose last token is END and occurs nowhere else, some of one token. */
typedef struct text_of {
    int32_t ids[TOKENS], starts[TOKENS]; /* of each token: the first one of its document */
} text_of;

static void draw_text(unsigned seed, text_of *out)
{
    srand(seed);
    for (int32_t t = 0; t < TOKENS; t++) {
        const bool begins = t == 0 || out->ids[t - 1] == END;
        out->starts[t] = begins ? t : out->starts[t - 1];
        out->ids[t] = rand() % 5 == 0 || t == TOKENS - 1 ? END : 'a' + rand() % 26;
    }
}

static nd_dataset *open_rows(const char *name, const char *text)
{
    nd_dataset *out;
    assert_ok(nd_dataset_open_text(tempdir_write(&dir, name, text, strlen(text)), ND_DATA_AUTO,
                                   corpus_request(&dir, NULL, 256), S, &out));
    return out;
}

/* one: all documents in one row. */
static nd_dataset *as_rows(const text_of *text, bool one)
{
    static char json[TEXT_MAX];
    int used = 0;
    for (int t = 0; t < TOKENS; t++) {
        const bool begins = one ? t == 0 : text->starts[t] == t;
        const bool ends = one ? t + 1 == TOKENS : text->ids[t] == END;
        used += begins ? sprintf(json + used, "{\"text\":\"") : 0;
        used += text->ids[t] == END ? sprintf(json + used, "\\u0007")
                                    : sprintf(json + used, "%c", (char)text->ids[t]);
        used += ends ? sprintf(json + used, "\"}\n") : 0;
    }
    return open_rows(one ? "one.jsonl" : "a.jsonl", json);
}

/* Takes over what the piece holds, and opens it as token files. */
static nd_dataset *open_piece(nd_corpus_piece *piece, int sequence)
{
    nd_dataset *out;
    snprintf(prefix, sizeof prefix, "%s/m", dir.path);
    assert_ok(corpus_write(prefix, 256, piece, 1));
    corpus_piece_free(piece);
    assert_ok(nd_dataset_open(prefix, ND_DATA_MEGATRON, "file", 256, sequence, &out));
    return out;
}

static nd_dataset *as_megatron(const text_of *text)
{
    nd_corpus_piece piece = {0};
    assert_ok(nd_ids_add(&piece.ids, text->ids, TOKENS));
    for (int32_t t = 0; t < TOKENS; t++) {
        const int32_t end = t + 1;
        assert_ok(text->ids[t] == END ? nd_ids_add(&piece.ends, &end, 1) : ND_OK);
    }
    return open_piece(&piece, S);
}

static nd_dataset *as_llmc(const text_of *text)
{
    nd_dataset *out;
    uint16_t ids[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        ids[t] = (uint16_t)text->ids[t];
    }
    assert_ok(nd_dataset_open(write_ids(&dir, ids, TOKENS), ND_DATA_LLMC, "file", 256, S, &out));
    return out;
}

/* A block as the data give it. */
typedef struct block_read {
    int32_t inputs[S], labels[S], first_keys[S];
    int64_t filled;
} block_read;

static block_read read_block(const nd_dataset *data, int64_t index)
{
    block_read out = {0};
    nd_block block = {out.inputs, out.labels, out.first_keys};
    assert_ok(nd_dataset_block(data, index, &block));
    out.filled = block.filled;
    return out;
}

static void check_borders(const nd_dataset *data, const text_of *text, unsigned seed)
{
    for (int64_t b = 0; b < nd_dataset_blocks(data); b++) {
        const block_read block = read_block(data, b);
        for (int64_t i = 0; i < S; i++) {
            const int64_t begin = b * (S + 1), t = begin + i;
            const bool counts = t + 1 < TOKENS && text->starts[t + 1] != t + 1;
            cr_assert_eq(block.labels[i], counts ? text->ids[t + 1] : ND_LABEL_IGNORED,
                         "seed %u: label of token %ld is %d", seed, (long)t, block.labels[i]);
            const int64_t first = t >= TOKENS               ? i
                                  : text->starts[t] > begin ? text->starts[t] - begin
                                                            : 0;
            cr_assert_eq(block.first_keys[i], first, "seed %u: token %ld sees from %d", seed,
                         (long)t, block.first_keys[i]);
        }
    }
}

Test(documents, every_format_knows_where_they_begin)
{
    nd_document_rules by_id = separate, listed_anyway = separate;
    by_id.end_of_text = END;
    listed_anyway.model_end = 'a'; /* of the model, whose text has it anywhere */
    for (unsigned seed = 0; seed < 8; seed++) {
        text_of text;
        draw_text(seed, &text);
        nd_dataset *list[] = {as_rows(&text, false), as_megatron(&text), as_llmc(&text),
                              as_rows(&text, true)};
        assert_ok(nd_dataset_set_documents(list[0], &automatic));
        cr_assert_not(nd_dataset_is_separate(list[0]), "rows without prompts");
        for (int i = 0; i < 4; i++) {
            assert_ok(nd_dataset_set_documents(list[i], i >= 2 ? &by_id : &listed_anyway));
            check_borders(list[i], &text, seed);
            int ends = 0;
            for (int t = 0; t < TOKENS; t++) {
                ends += text.ids[t] == END;
            }
            const int64_t listed[] = {ends, ends, -1, 1};
            cr_expect_eq(nd_dataset_facts_of(list[i]).documents, listed[i]);
            nd_dataset_close(list[i]);
        }
    }
}

/* The byte of row r, which no other one has and JSON does not escape. */
static int byte_of(int r)
{
    return r + '(' + (r >= '\\' - '(');
}

static int prompt_of(int r, int length)
{
    return length > 1 + r % 3 ? 1 + r % 3 : length > 1 ? length - 1 : 1;
}

/* Row r is its byte repeated, at first as a prompt. One row in nine may be longer than a block. */
static nd_dataset *prompts(int lengths[ROWS], const nd_document_rules *rules)
{
    static char json[TEXT_MAX];
    int used = 0;
    for (int r = 0; r < ROWS; r++) {
        lengths[r] = 1 + rand() % (r % 9 == 0 ? 3 * S : S);
        used += sprintf(json + used, "{\"prompt\":\"");
        for (int i = 0; i < lengths[r]; i++) {
            const bool completion = i == prompt_of(r, lengths[r]);
            used += completion ? sprintf(json + used, "\",\"completion\":\"") : 0;
            json[used++] = (char)byte_of(r);
        }
        used += sprintf(json + used, lengths[r] > 1 ? "\"}\n" : "\",\"completion\":\"\"}\n");
    }
    nd_dataset *data = open_rows("p.jsonl", json);
    assert_ok(nd_dataset_set_documents(data, rules));
    return data;
}

/* The tokens of a row that are read: the last one is left out where it would be alone. */
static int kept_of(int length, int sequence, bool drop)
{
    return drop && length > sequence + 1 ? 0 : length - (length % (sequence + 1) == 1);
}

/* As many blocks take the rows in the order of the file. *padding: the share of their inputs that
 * fills them; NULL: not wanted. */
static int blocks_in_order(const int *lengths, int count, int sequence, bool drop, double *padding)
{
    int blocks = 0, room = 0, inputs = 0;
    for (int r = 0; r < count; r++) {
        for (int left = kept_of(lengths[r], sequence, drop); left > 0; left -= sequence + 1) {
            const int piece = left < sequence + 1 ? left : sequence + 1;
            blocks += piece > room;
            room = (piece > room ? sequence + 1 : room) - piece;
            inputs += piece - (room == 0);
        }
    }
    if (padding) {
        *padding = 1 - (double)inputs / ((double)blocks * sequence);
    }
    return blocks;
}

/* Counts the tokens and pieces of each row that blocks have given so far. */
typedef struct rows_seen {
    int tokens[128], pieces[128]; /* by byte */
    int64_t inputs;
} rows_seen;

/* Each piece sees itself alone, and only its tokens behind the prompt are labels. */
static void check_block(const nd_dataset *data, int64_t b, const int lengths[ROWS], rows_seen *seen)
{
    const block_read block = read_block(data, b);
    const int32_t *inputs = block.inputs, *labels = block.labels, *first_keys = block.first_keys;
    const int64_t filled = block.filled;
    const bool whole = filled == S && labels[S - 1] != ND_LABEL_IGNORED; /* S + 1 tokens */
    for (int i = 0; i < S; i++) {
        if (i >= filled) {
            cr_assert(inputs[i] == 0 && labels[i] == ND_LABEL_IGNORED && first_keys[i] == i);
            continue;
        }
        const bool begins = i == 0 || first_keys[i] == i;
        const bool ends = i + 1 < filled ? first_keys[i + 1] == i + 1 : !whole;
        const int r = inputs[i] - '(' - (inputs[i] > '\\');
        cr_assert(r >= 0 && r < ROWS &&
                  (begins || (inputs[i] == inputs[i - 1] && first_keys[i] == first_keys[i - 1])));
        const bool counts = !ends && i + 1 - first_keys[i] >= prompt_of(r, lengths[r]);
        cr_assert_eq(labels[i], counts ? inputs[i] : ND_LABEL_IGNORED, "block %ld, token %d: %d",
                     (long)b, i, labels[i]);
        seen->tokens[inputs[i]] += i + 1 == S && whole ? 2 : 1;
        seen->pieces[inputs[i]] += begins;
    }
    seen->inputs += filled;
}

/* Returns the number of blocks that are saved. */
static int64_t check_rows(const nd_dataset *data, const int lengths[ROWS], bool drop)
{
    static rows_seen seen;
    const int64_t blocks = nd_dataset_blocks(data);
    int longer = 0, rows = 0;
    int64_t kept = 0, prompts_kept = 0, ignored;
    memset(&seen, 0, sizeof seen);
    for (int64_t b = 0; b < blocks; b++) {
        check_block(data, b, lengths, &seen);
    }
    for (int r = 0; r < ROWS; r++) {
        const int own = kept_of(lengths[r], S, drop), c = byte_of(r);
        cr_assert_eq(seen.tokens[c], own, "row %d has %d of %d", r, seen.tokens[c], lengths[r]);
        cr_assert_eq(seen.pieces[c], (own + S) / (S + 1), "row %d is in pieces", r);
        longer += lengths[r] > S + 1;
        rows += own > 0;
        kept += own;
        prompts_kept += own > 0 ? prompt_of(r, lengths[r]) : 0;
    }
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    cr_assert_eq(facts.long_rows, longer);
    cr_assert_eq(facts.drops, drop);
    cr_assert_eq(facts.documents, rows);
    cr_assert_eq(facts.padding, 1 - (double)seen.inputs / (double)(blocks * S));
    /* Rows that are left out are in no number. */
    assert_ok(nd_dataset_ignored(data, &ignored));
    cr_assert_eq(nd_dataset_tokens(data), kept);
    cr_assert_eq(ignored, prompts_kept);
    return blocks_in_order(lengths, ROWS, S, drop, NULL) - blocks;
}

Test(documents, rows_with_prompts_stay_whole)
{
    int64_t saved = 0;
    for (unsigned seed = 0; seed < 20; seed++) {
        int lengths[ROWS];
        srand(seed);
        nd_document_rules rules = automatic;
        rules.drop_long = seed % 2;
        nd_dataset *data = prompts(lengths, &rules);
        cr_assert(nd_dataset_is_separate(data) && nd_dataset_facts_of(data).lists > 0);
        const int64_t less = check_rows(data, lengths, rules.drop_long);
        cr_assert_geq(less, 0, "seed %u: more blocks than in the order of the file", seed);
        saved += less;
        nd_dataset_close(data);
    }
    cr_assert_gt(saved, 20, "a block has what follows in the file");
}

/* Rows of token files; the first token of each does not count, nor the last of three or more. */
static nd_dataset *of_lengths(const int *lengths, int count, int sequence)
{
    nd_corpus_piece piece = {0};
    int32_t end = 0;
    for (int r = 0; r < count; r++) {
        const int32_t spans[] = {end, end + 1, end + lengths[r] - 1, end + lengths[r]};
        for (int i = 0; i < lengths[r]; i++) {
            assert_ok(nd_ids_add(&piece.ids, &(int32_t){r % 256}, 1));
        }
        end += lengths[r];
        assert_ok(nd_ids_add(&piece.ends, &end, 1));
        assert_ok(nd_ids_add(&piece.spans, spans, lengths[r] > 2 ? 4 : 2));
    }
    nd_dataset *out = open_piece(&piece, sequence);
    assert_ok(nd_dataset_set_documents(out, &automatic));
    return out;
}

/* Rows of the first blocks, in the mean. */
static double rows_of_blocks(const nd_dataset *data, int64_t blocks, int sequence)
{
    static int32_t inputs[4096], labels[4096], first_keys[4096];
    nd_block block = {inputs, labels, first_keys};
    int64_t rows = 0;
    for (int64_t b = 0; b < blocks; b++) {
        assert_ok(nd_dataset_block(data, b, &block));
        cr_assert_leq(block.filled, sequence);
        for (int64_t i = 0; i < block.filled; i++) {
            rows += i == 0 || first_keys[i] == i;
        }
    }
    return (double)rows / (double)blocks;
}

Test(documents, packed_rows_leave_little_of_their_blocks)
{
    enum { MANY = 4000 };
    static int lengths[MANY];
    srand(1);
    for (int r = 0; r < MANY; r++) { /* log-normal: a sum of uniforms is nearly normal */
        double normal = -6;
        for (int i = 0; i < 12; i++) {
            normal += (double)rand() / RAND_MAX;
        }
        lengths[r] = 1 + (int)(110 * exp(0.8 * normal));
    }
    for (int sequence = 1024; sequence <= 4096; sequence *= 4) {
        nd_dataset *data = of_lengths(lengths, MANY, sequence);
        double padding;
        const int in_order = blocks_in_order(lengths, MANY, sequence, false, &padding);
        printf("blocks of %d tokens: %.2f %% of %d are padding in the order of the file, %.2f %% "
               "of %lld with the longest rows first\n",
               sequence, 100 * padding, in_order, 100 * nd_dataset_facts_of(data).padding,
               (long long)nd_dataset_blocks(data));
        cr_expect_lt(nd_dataset_facts_of(data).padding, 0.01);
        cr_expect_lt((double)nd_dataset_blocks(data), (sequence > 1024 ? 0.98 : 0.92) * in_order);
        /* The first blocks are like all: they are not those of the longest rows. */
        const int64_t blocks = nd_dataset_blocks(data);
        const double all = rows_of_blocks(data, blocks, sequence);
        cr_expect_gt(rows_of_blocks(data, blocks / 10, sequence), 0.7 * all);
        nd_dataset_close(data);
    }
}

/* Rows that fill blocks in the order of the file; blocks of two tokens; rows as long as a block. */
Test(documents, packed_rows_of_few_lengths)
{
    static const struct {
        int sequence, lengths[6], blocks, rows, pieces, tokens, ignored;
    } cases[] = {{8, {4, 3, 2, 4, 3, 2}, 2, 6, 6, 18, 10},
                 {8, {9, 9, 1, 9, 2, 7}, 4, 5, 5, 36, 9},
                 {1, {1, 2, 3, 5, 2, 1}, 5, 4, 5, 10, 4}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        nd_dataset *data = of_lengths(cases[c].lengths, 6, cases[c].sequence);
        int64_t ignored;
        assert_ok(nd_dataset_ignored(data, &ignored));
        cr_expect_eq(ignored, cases[c].ignored, "case %zu", c);
        cr_expect_eq(nd_dataset_facts_of(data).lists, 8 * (cases[c].pieces + cases[c].blocks + 1));
        cr_expect_eq(nd_dataset_blocks(data), cases[c].blocks, "case %zu", c);
        cr_expect_eq(nd_dataset_tokens(data), cases[c].tokens, "case %zu", c);
        cr_expect_eq(nd_dataset_facts_of(data).documents, cases[c].rows, "case %zu", c);
        nd_dataset_close(data);
    }
}

enum { CHANGED_ROWS = 20000 };

typedef struct index_change {
    uint8_t *documents; /* of an .idx, as the file has them: (CHANGED_ROWS + 1) i64 */
    atomic_int turns;   /* of the delay before all borders change */
} index_change;

static void move_borders(const index_change *c, int64_t by)
{
    for (int64_t i = 1; i < CHANGED_ROWS; i += 2) {
        const int64_t at = i + by;
        memcpy(c->documents + 8 * i, &at, sizeof at);
    }
}

/* Every second border falls together with the one before. */
static void *change_index(void *context)
{
    index_change *c = context;
    for (int turns = 0; turns == 0; turns = atomic_load(&c->turns)) {
    }
    while (atomic_fetch_sub(&c->turns, 1) > 1) {
    }
    move_borders(c, -1);
    return NULL;
}

/* Rows are counted, sorted and laid: the boundaries may change between. No memory behind what was
 * counted is written, which sanitizers see; all rows are packed, or it is said. */
Test(documents, boundaries_that_change_while_rows_are_packed)
{
    static int lengths[CHANGED_ROWS];
    struct stat size;
    int seen[2] = {0};
    for (int r = 0; r < CHANGED_ROWS; r++) {
        lengths[r] = 3 + r % 5;
    }
    nd_dataset_close(of_lengths(lengths, CHANGED_ROWS, 31));
    const int fd = open(tempdir_file(&dir, "m.idx"), O_RDWR);
    cr_assert(fd >= 0 && fstat(fd, &size) == 0);
    uint8_t *map = mmap(NULL, (size_t)size.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert_neq(map, MAP_FAILED);
    close(fd);
    for (int round = 0; round < 60; round++) {
        index_change change = {.documents = map + size.st_size - 8 * (CHANGED_ROWS + 1)};
        pthread_t thread;
        nd_dataset *data;
        assert_ok(nd_dataset_open(prefix, ND_DATA_MEGATRON, "file", 256, 31, &data));
        cr_assert_eq(pthread_create(&thread, NULL, change_index, &change), 0);
        atomic_store(&change.turns, 1 + round * 4000);
        const nd_status status = nd_dataset_set_documents(data, &automatic);
        cr_assert(status == ND_OK || status == ND_ERR_DATA);
        seen[status == ND_OK]++;
        cr_assert_eq(pthread_join(thread, NULL), 0);
        move_borders(&change, 0); /* to which the loss mask belongs */
        nd_dataset_close(data);
    }
    printf("%d of 60 changes were seen\n", seen[0]);
    munmap(map, (size_t)size.st_size);
}

Test(documents, a_blend_has_those_of_its_parts)
{
    nd_dataset_part parts[] = {{.name = "a"}, {.name = "b"}, {.name = "c"}, {.name = "d"}};
    nd_dataset *own[4];
    int lengths[ROWS];
    int64_t at = 0, tokens = 0;
    size_t lists = 0;
    text_of text;
    draw_text(3, &text);
    for (int i = 0; i < 4; i++) { /* two of joined documents, two of whole rows */
        own[i] = parts[i].data = i < 2 ? as_rows(&text, false) : prompts(lengths, &automatic);
        tokens += nd_dataset_tokens(own[i]);
        lists += nd_dataset_facts_of(own[i]).lists;
    }
    assert_ok(nd_dataset_blend(parts, 4, &dataset));
    cr_assert(nd_dataset_is_separate(dataset));
    cr_assert_eq(nd_dataset_documents(dataset), ND_DOCUMENTS_AUTO);
    cr_expect_eq(nd_dataset_tokens(dataset), tokens);
    cr_expect_eq(nd_dataset_facts_of(dataset).lists, lists);
    for (int i = 0; i < 4; i++) {
        for (int64_t b = 0; b < nd_dataset_blocks(own[i]); b++) {
            const block_read block = read_block(dataset, at++), alone = read_block(own[i], b);
            cr_assert_eq(memcmp(&block, &alone, sizeof block), 0, "part %d, block %d", i, (int)b);
        }
    }
    cr_assert_eq(nd_dataset_blocks(dataset), at);
}

/* The numbers that a test counts of a step. */
typedef struct seen {
    int64_t pairs, most, padding, inputs;
} seen;

/* Pairs of a query and a key in all layers, one by one. Ranks that exchange heads for tokens see
 * those of one another. */
static void count_pairs(const nd_loader_options *o, const int32_t *first_keys,
                        const int32_t *places, seen *count)
{
    const nd_deal_windows *w = &o->deal.windows;
    const int groups = o->deal.cp / o->deal.ulysses;
    int64_t most = 0;
    for (int g = 0; g < groups; g++) {
        int64_t own = 0;
        for (int64_t i = g * S / groups; i < (g + 1) * S / groups; i++) {
            for (int64_t key = 0; key <= places[i]; key++) {
                const bool of_document = key >= first_keys[places[i]];
                const bool near = places[i] - key < w->window;
                own +=
                    of_document * (w->layers - w->windowed) + (of_document && near) * w->windowed;
            }
        }
        most = own > most ? own : most;
        count->pairs += own;
    }
    count->most += most * groups;
}

/* Checks one cp rank's part of a row: the tokens that it is dealt. Returns the row's number of
 * inputs that only fill the block. */
static int64_t check_row(const nd_loader_options *o, int64_t row, seen *count)
{
    const int64_t local = S / o->deal.cp, at = row % 4 * local;
    const block_read block = read_block(dataset, row);
    const int32_t *first_keys = block.first_keys;
    int32_t places[S], own[S];
    int64_t scratch[4 * S];
    cr_assert_leq(nd_deal_bytes(&o->deal), sizeof scratch);
    nd_deal(&o->deal, first_keys, scratch, places);
    nd_deal_local(&o->deal, places, o->cp_index, own);
    cr_assert_eq(memcmp(batch.first_keys + row % 4 * S, first_keys, sizeof block.first_keys), 0);
    cr_assert_eq(memcmp(batch.places + row % 4 * S, places, sizeof places), 0);
    for (int64_t i = 0; i < local; i++) {
        cr_assert_eq(batch.inputs[at + i], block.inputs[own[i]]);
        cr_assert_eq(batch.labels[at + i], block.labels[own[i]]);
        cr_assert_eq(batch.positions[at + i], o->running ? own[i] : own[i] - first_keys[own[i]]);
    }
    count_pairs(o, first_keys, places, count);
    count->padding += S - block.filled;
    count->inputs += S;
    return S - block.filled;
}

static void check_loader(const nd_loader_options *o)
{
    const int64_t steps = nd_loader_validation_steps(dataset, o);
    seen count = {0};
    int64_t padding = 0;
    use_loader(dataset, o);
    for (int64_t row = 0; row < 4 * steps; row++) {
        if (row % 4 == 0) {
            next_batch();
            count = (seen){0};
        }
        padding += row < nd_dataset_blocks(dataset) ? check_row(o, row, &count) : 0;
        if (row % 4 == 3) {
            cr_assert_eq(batch.sight.pairs, count.pairs / o->deal.windows.layers);
            cr_assert_eq(batch.sight.balance, (double)count.most / (double)count.pairs);
            cr_assert_eq(batch.sight.padding, (double)count.padding / (double)count.inputs);
        }
    }
    cr_assert_gt(padding, 0, "no block is short");
}

Test(documents, the_loader_deals_tokens_with_labels_positions_and_first_keys)
{
    int lengths[ROWS];
    text_of text;
    draw_text(5, &text);
    for (int i = 0; i < 2 * 2 * 3; i++) {
        const bool packed = i >= 2 * 3, other = i / 3 % 2;
        use_dataset(packed ? prompts(lengths, &separate) : as_rows(&text, false));
        assert_ok(packed ? ND_OK : nd_dataset_set_documents(dataset, &separate));
        check_loader(
            &(nd_loader_options){.deal = {S, 1 << i % 3, i % 3 < 2 ? 1 : 2, {3 * other, other, 2}},
                                 .micro_batch = 2,
                                 .accumulation = 2,
                                 .dp_size = 1,
                                 .cp_index = i % 3 == 2,
                                 .validation = true,
                                 .separate = true,
                                 .running = other});
    }
    close_dataset();
}

/* Takes the data over. */
static void rules_fail(nd_dataset *data, const nd_document_rules *rules, nd_status status,
                       const char *words)
{
    assert_fails(nd_dataset_set_documents(data, rules), status, words);
    nd_dataset_close(data);
}

Test(documents, what_nothing_separates_is_refused)
{
    text_of text;
    draw_text(1, &text);
    nd_document_rules rules = separate;
    rules_fail(as_llmc(&text), &rules, ND_ERR_CONFIG,
               "give the id that ends them as data.end_of_text");
    rules.model_end = 'A';
    rules_fail(as_llmc(&text), &rules, ND_ERR_DATA, "id 65, which should end");
    /* Where there are several rows, the id need not occur in any. */
    rules = separate;
    rules.end_of_text = 'A';
    rules_fail(as_rows(&text, true), &rules, ND_ERR_DATA, "id 65, which should end");
    nd_dataset *data = as_rows(&text, false);
    assert_ok(nd_dataset_set_documents(data, &rules));
    nd_dataset_close(data);
    rules = (nd_document_rules){.rule = ND_DOCUMENTS_JOIN, .end_of_text = 256, .model_end = -1};
    rules_fail(as_megatron(&text), &rules, ND_ERR_CONFIG,
               "data.end_of_text is 256, but the model's vocabulary ends at 255");
    assert_ok(nd_dataset_open(tempdir_write(&dir, "b.txt", "bytes", 5), ND_DATA_TEXT, "bytes", 256,
                              S, &data));
    rules_fail(data, &rules, ND_ERR_CONFIG, "data.end_of_text is 256, but bytes end at 255");
    /* A text is one document, whatever ends those of the model. */
    rules = separate;
    rules.model_end = 'y';
    assert_ok(nd_dataset_open(tempdir_file(&dir, "b.txt"), ND_DATA_TEXT, "bytes", 256, S, &data));
    assert_ok(nd_dataset_set_documents(data, &rules));
    cr_expect_eq(nd_dataset_facts_of(data).documents, 1);
    nd_dataset_close(data);
    rules = automatic;
    rules.drop_long = true;
    rules_fail(open_rows("q.jsonl", "{\"prompt\":\"123456789\",\"completion\":\"0\"}\n"), &rules,
               ND_ERR_DATA, "has 2 to 9 tokens, and data.long_rows is drop; raise");
    rules_fail(open_rows("r.jsonl", "{\"prompt\":\"1\",\"completion\":\"\"}\n"
                                    "{\"prompt\":\"\",\"completion\":\"2\"}\n"),
               &rules, ND_ERR_DATA, "has 2 to 9 tokens; a row needs an input");
}
