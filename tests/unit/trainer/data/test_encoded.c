// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "tests/unit/trainer/data/data_cases.h"

enum { S = 7, IGNORED = ND_LABEL_IGNORED, VOCAB = 512 };

static tempdir dir;

TEMPDIR_SUITE(encoded, tempdir_leave_empty);

static void open_text(const char *rows)
{
    const char *path = tempdir_write(&dir, "a.jsonl", rows, strlen(rows));
    close_dataset();
    assert_ok(nd_dataset_open_text(path, ND_DATA_AUTO,
                                   corpus_request(&dir, text_path("llama3"), VOCAB), S, &dataset));
}

static void encode_rows(const char *rows, corpus_result *out)
{
    nd_tokenizer *tokenizer = text_open("llama3");
    const char *path = tempdir_write(&dir, "b.jsonl", rows, strlen(rows));
    assert_ok(corpus_encode_path(path, (nd_corpus_job){.tokenizer = tokenizer}, out));
    nd_tokenizer_close(tokenizer);
}

static const char rows[] = "{\"text\":\"the first one, a text of some words\"}\n"
                           "{\"prompt\":\"what is it?\",\"completion\":\" it is this\"}\n"
                           "{\"prompt\":\"\",\"completion\":\"no prompt\"}\n"
                           "{\"prompt\":\"a prompt of many words, of more than a block\","
                           "\"completion\":\"\"}\n"
                           "{\"prompt\":\"and the next one\",\"completion\":\"!\"}\n"
                           "{\"text\":\"the end\"}\n";

/* The rows are those of token files, which must have the same blocks. */
static void open_token_files(const corpus_result *all)
{
    const nd_corpus_piece whole = {.ids = all->ids, .ends = all->ends, .spans = all->spans};
    char prefix[PATH_MAX];
    snprintf(prefix, sizeof prefix, "%s/p", dir.path);
    assert_ok(corpus_write(prefix, VOCAB, &whole, 1));
    close_dataset();
    assert_ok(nd_dataset_open(prefix, ND_DATA_AUTO, "file", VOCAB, S, &dataset));
}

/* Inputs are all tokens in a row; labels are those behind them, unless they belong to a prompt. So
 * it is whether a run encodes the rows or `ndtrain tokenize` did. */
Test(encoded, blocks_have_the_ids_and_ignore_prompts)
{
    corpus_result all = {0};
    bool ignored[4096] = {false};
    encode_rows(rows, &all);
    cr_assert_gt(all.spans.count, 4);
    for (size_t i = 0; i < all.spans.count; i += 2) {
        for (int32_t t = all.spans.data[i]; t < all.spans.data[i + 1]; t++) {
            ignored[t] = true;
        }
    }
    for (int files = 0; files < 2; files++) {
        const size_t count = all.ids.count;
        int64_t uncounted;
        files ? open_token_files(&all) : open_text(rows);
        cr_assert_eq(nd_dataset_tokens(dataset), (int64_t)count);
        cr_assert_eq(nd_dataset_blocks(dataset),
                     (int64_t)(count / (S + 1) + (count % (S + 1) > 1)));
        for (int64_t b = 0; b < nd_dataset_blocks(dataset); b++) {
            int32_t inputs[S], labels[S];
            assert_ok(nd_dataset_block(dataset, b, &(nd_block){inputs, labels}));
            for (int64_t i = 0; i < S; i++) {
                size_t t = (size_t)(b * (S + 1) + i);
                cr_expect_eq(inputs[i], t < count ? all.ids.data[t] : 0, "token %zu", t);
                int32_t label = t + 1 < count && !ignored[t + 1] ? all.ids.data[t + 1] : IGNORED;
                cr_expect_eq(labels[i], label, "label of token %zu", t);
            }
        }
        assert_ok(nd_dataset_ignored(dataset, &uncounted));
        cr_expect_eq(uncounted, all.counts.ignored);
    }
    corpus_free(&all);
}

Test(encoded, its_facts_name_the_cache_and_count_the_documents)
{
    open_text(rows);
    const nd_dataset_facts facts = nd_dataset_facts_of(dataset);
    cr_assert_str_eq(facts.path, tempdir_file(&dir, "a.jsonl"));
    cr_assert_str_eq(facts.format, "encoded text");
    cr_assert_eq(facts.documents, 6);
    cr_assert_not_null(facts.cache);
    cr_assert_eq(strncmp(facts.cache, dir.path, strlen(dir.path)), 0, "%s", facts.cache);
    cr_assert(tempdir_has_path(facts.cache), "%s", facts.cache);
}

Test(encoded, a_letter_changes_the_digest)
{
    char digests[2][65];
    for (int i = 0; i < 2; i++) {
        open_text(i ? "{\"text\":\"Second\"}\n" : "{\"text\":\"second\"}\n");
        assert_ok(nd_dataset_digest(dataset, digests[i]));
    }
    cr_expect_str_neq(digests[0], digests[1]);
}

Test(encoded, damaged_spans_are_found_when_they_are_counted)
{
    int64_t ignored;
    open_text(rows);
    const nd_token_cache *cache = dataset->cache;
    corpus_set_byte(cache->path, cache->view.span_pairs - cache->map.data, '\xff');
    assert_fails(nd_dataset_ignored(dataset, &ignored), ND_ERR_DATA, "is damaged");
}

Test(encoded, a_file_of_ids_is_known_by_its_name)
{
    bool ids = true, jsonl = false;
    assert_ok(nd_data_holds("a.jsonl", ND_DATA_AUTO, &ids, &jsonl));
    cr_expect(!ids && jsonl);
    assert_ok(nd_data_holds("a.bin", ND_DATA_AUTO, &ids, &jsonl));
    cr_expect(ids && !jsonl);
    for (int i = 0; i < 2; i++) {
        assert_ok(nd_data_holds(i ? "a.txt.gz" : "a.txt.zst", ND_DATA_AUTO, &ids, &jsonl));
        cr_expect(!ids && jsonl, "a text that is not mapped");
    }
    assert_ok(nd_data_holds("folder/*.txt", ND_DATA_AUTO, &ids, &jsonl));
    cr_expect(!ids && !jsonl);
}
