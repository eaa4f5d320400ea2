// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include "runtime/base/hash.h"
#include "tests/support/printed.h"
#include "tests/unit/trainer/corpus/corpus_cases.h"
#include "trainer/corpus/chat.h"

static tempdir dir;
static corpus_result out, whole; /* of the last encoding, and what it should be */
static nd_tokenizer *opened[16]; /* closed at the end of a test */
static nd_corpus_rules rules = {.json_key = "text", .pairs = true};
static nd_corpus_job job = {.rules = &rules}; /* with the tokenizer in use */

static void use(nd_tokenizer *tokenizer)
{
    int i = 0;
    while (opened[i]) {
        i++;
    }
    job.tokenizer = opened[i] = tokenizer;
}

static void setup(void)
{
    tempdir_make(&dir);
}

static void teardown(void)
{
    for (int i = 0; opened[i]; i++) {
        nd_tokenizer_close(opened[i]);
    }
    corpus_free(&out);
    corpus_free(&whole);
    tempdir_remove(&dir);
}

TestSuite(corpus, .init = setup, .fini = teardown);

static nd_corpus_files files_of(const char *path)
{
    nd_corpus_files files = {0};
    assert_ok(nd_corpus_files_add(&files, path, ND_DATA_AUTO));
    return files;
}

/* Encodes these files, which it frees. */
static nd_status encode_files(nd_corpus_files files, corpus_result *result)
{
    job.files = &files;
    nd_status status = corpus_encode(job, result);
    nd_corpus_files_fini(&files);
    return status;
}

/* Encodes a file that holds this text. */
static nd_status encode_text(const char *name, const char *text, corpus_result *result)
{
    return corpus_encode_path(tempdir_write(&dir, name, text, strlen(text)), job, result);
}

static void encode_rows(const char *rows)
{
    assert_ok(encode_text("a.jsonl", rows, &out));
}

static void rows_fail(const char *rows, const char *words)
{
    assert_fails(encode_text("a.jsonl", rows, &out), ND_ERR_DATA, words);
}

/* A message, lists and rows of one or two. */
#define SAYS(role, content) "{\"role\": \"" role "\", \"content\": \"" content "\"}"
#define ROW(messages)       "{\"messages\": [" messages "]}\n"
#define LIST(message)       "[" message "]"
#define LIST2(first, then)  "[" first ", " then "]"
#define ROW2(first, then)   "{\"messages\": [" first ", " then "]}\n"

/* A text that is encoded in parts has the ids of the whole, for each way to cut. */
Test(corpus, parts_of_a_text_have_the_ids_of_the_whole)
{
    static const struct {
        const char *family;
        size_t cut; /* before the last blank, behind the last newline, or nowhere */
    } cases[] = {{"gpt2", 5},   {"digits", 5}, {"llama3", 4},   {"qwen2", 4},
                 {"prefix", 0}, {"llama2", 0}, {"metaspace", 0}};
    rules.drop_unknown = rules.add_special = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        use(corpus_tokenizer(cases[i].family));
        cr_assert_eq(nd_text_cut(job.tokenizer, "a b\nc\n d e", 8), cases[i].cut, "%s",
                     cases[i].family);
        char text[20001];
        const size_t size = text_random(i + 1, false, text, sizeof text - 1);
        text[size] = '\0';
        for (size_t at = 90; at + 1 < size; at += 91) {
            text[at] = '\xff'; /* in the place of a character, or within one */
        }
        job.block_bytes = 1 << 20;
        job.threads = 1;
        assert_ok(encode_text("a.txt", text, &whole));
        cr_assert_eq(whole.counts.documents, 1);
        job.threads = 3;
        for (job.block_bytes = 1; job.block_bytes < 200; job.block_bytes *= 3, job.block_bytes++) {
            assert_ok(encode_text("a.txt", text, &out));
            corpus_assert_equal(&whole, &out, cases[i].family);
        }
    }
}

/* A cut within white space that a token takes would leave some of it to the next part. */
Test(corpus, no_text_is_cut_where_a_token_takes_white_space)
{
    static const char *const keys[] = {"lstrip", "rstrip"};
    for (int k = 0; k < 2; k++) {
        nd_tokenizer *tokenizer;
        json_t *file = text_file("gpt2"), *added = json_object_get(file, "added_tokens");
        for (size_t i = 0; i < json_array_size(added); i++) {
            json_object_set_new(json_array_get(added, i), keys[1 - k], json_false());
        }
        assert_ok(text_parse(file, &tokenizer));
        use(tokenizer);
        cr_expect_eq(nd_text_cut(tokenizer, "a b\nc", 6), 0, "%s", keys[k]);
        json_decref(file);
    }
}

/* Rows of text and of prompts with completions, with odd white space between them. */
static void write_rows(const char *name, int rows)
{
    nd_bytes all = {0};
    assert_ok(nd_bytes_add(&all, "\xef\xbb\xbf\r\n \n", 7));
    for (int i = 0; i < rows; i++) {
        char row[256];
        int n;
        if (i % 3 == 0) {
            n = snprintf(row, sizeof row,
                         "{\"prompt\": \"question %d? \", \"completion\": \"yes\"}\r\n", i);
        } else if (i % 7 == 0) {
            n = snprintf(row, sizeof row, "{\"text\": \"\", \"id\": %d}\n\n", i);
        } else {
            n = snprintf(row, sizeof row,
                         "{\"id\": %d, \"text\": \"row\\n number %d \\u4f60%.*s\"}\n", i, i, i % 50,
                         "the quick brown fox jumps over the lazy dog again");
        }
        assert_ok(nd_bytes_add(&all, row, (size_t)n));
    }
    tempdir_write(&dir, name, all.data, all.count);
    free(all.data);
}

Test(corpus, rows_do_not_depend_on_threads_and_blocks)
{
    use(text_open("llama3"));
    job.eod = 420;
    write_rows("a.jsonl", 500);
    assert_ok(corpus_encode_path(tempdir_file(&dir, "a.jsonl"), job, &whole));
    cr_expect_eq(whole.counts.documents + whole.counts.empty, 500);
    cr_expect_eq(whole.counts.empty, 48);
    cr_expect_eq(whole.ends.count, (size_t)whole.counts.documents);
    cr_expect_eq(whole.spans.count, 2u * 167u);
    cr_expect_eq(whole.ids.data[whole.ids.count - 1], 420);
    cr_expect_eq(whole.ends.data[whole.ends.count - 1], (int32_t)whole.ids.count);
    for (int threads = 1; threads <= 5; threads += 2) {
        job.threads = threads;
        job.block_bytes = 100 * (size_t)threads;
        assert_ok(corpus_encode_path(tempdir_file(&dir, "a.jsonl"), job, &out));
        corpus_assert_equal(&whole, &out, "threads");
        cr_expect_eq(memcmp(&whole.counts, &out.counts, sizeof whole.counts), 0);
    }
}

Test(corpus, bad_rows_are_named_and_may_be_left_out)
{
    static const char rows[] = "{\"text\":\"good\"}\n{\"text\":1}\n\n{\"text\":\"good\"}\nno\n"
                               "{\"other\":\"x\"}\n{\"text\":\"good\"}";
    static const char *const words[] = {
        "a.jsonl\" line 2: \"text\" is not a string",
        "line 5, column 1: it is no JSON object (while leaving out 1 other bad row, as many as may "
        "be left out)",
        "line 6: \"text\" is missing"};
    use(text_open("gpt2"));
    for (job.threads = 1; job.threads < 4; job.threads++) {
        job.block_bytes = job.threads == 3 ? 16 : 0;
        for (job.skip_bad = 0; job.skip_bad < 3; job.skip_bad++) {
            rows_fail(rows, words[job.skip_bad]);
        }
        encode_rows(rows);
        cr_expect_eq(out.counts.bad, 3);
        cr_expect_eq(out.counts.documents, 3);
    }
}

/* Not as a bad row of the block before. */
Test(corpus, a_reader_that_fails_is_reported_as_that)
{
    use(text_open("gpt2"));
    tempdir_write(&dir, "a.jsonl", "{\"text\":1}\n", 11);
    tempdir_write(&dir, "b.jsonl", "\x1f\x8b\x08\x00", 4);
    job.skip_bad = 1;
    assert_fails(corpus_encode_path(dir.path, job, &out), ND_ERR_DATA,
                 "b.jsonl\" ends within its compressed data");
}

/* The prompt of a bad row was encoded, but is not in the output. */
Test(corpus, what_is_left_out_is_not_counted)
{
    use(text_open("llama3"));
    rules.refuse_invalid = true;
    job.skip_bad = 1;
    encode_rows("{\"prompt\":\"bad \\ud800<|eot|>\",\"completion\":\"\xff\"}\n"
                "{\"text\":\"good <|eot|>\"}\n");
    cr_expect_eq(out.counts.bad, 1);
    cr_expect_eq(out.counts.text.bytes, 12);
    cr_expect_eq(out.counts.text.special, 1);
    cr_expect_eq(out.counts.lone, 0);
    rules.drop_unknown = true;
    for (int drops = 0; drops < 2; drops++) { /* what has no piece is unknown, or dropped */
        json_t *file = text_file("unknown");
        nd_tokenizer *tokenizer;
        if (drops) {
            json_object_del(json_object_get(file, "model"), "unk_token");
        }
        assert_ok(text_parse(file, &tokenizer));
        json_decref(file);
        use(tokenizer);
        encode_rows("{\"prompt\":\"\\u00f1\",\"completion\":\"\xff\"}\n{\"text\":\"a\\u00f1z\"}\n");
        cr_expect_eq(out.counts.text.unknown, !drops);
        cr_expect_eq(out.counts.text.dropped, drops);
    }
}

Test(corpus, what_the_rules_refuse_is_said)
{
    use(text_open("llama3"));
    rules.refuse_invalid = true;
    rules.special_in_text = ND_SPECIAL_REFUSE;
    rows_fail("{\"text\":\"a\"}\n{\"text\":\"b\xff\"}\n",
              "a.jsonl\" line 2: the text is not UTF-8 from byte 1");
    rows_fail("{\"text\":\"a<|eot|>\"}\n", "<|eot|>");
    rows_fail("{\"prompt\":\"a question\",\"completion\":\"\"}\n", "counts in the loss");
}

Test(corpus, a_separator_makes_documents)
{
    static const char text[] = "first\n\nsecond one\n\n\n\nthird\n\n";
    use(text_open("llama2"));
    rules.separator = "\n\n";
    rules.separator_size = 2;
    assert_ok(encode_text("a.txt", text, &whole));
    cr_expect_eq(whole.counts.documents, 3);
    cr_expect_eq(whole.counts.empty, 1);
    job.threads = 2;
    for (job.block_bytes = 1; job.block_bytes < 12; job.block_bytes++) {
        assert_ok(encode_text("a.txt", text, &out));
        corpus_assert_equal(&whole, &out, "separator");
    }
}

Test(corpus, how_a_separator_is_written)
{
    static const char *const written[][2] = {
        {"\\n\\n", "\n\n"}, {"\\r\\t\\\\", "\r\t\\"}, {"a\\bc\\", "a\\bc\\"}, {"%\n", "%\n"}};
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        char *text = NULL;
        assert_ok(nd_corpus_separator(written[i][0], &rules, &text));
        cr_assert_eq(rules.separator_size, strlen(written[i][1]));
        cr_expect_arr_eq(rules.separator, written[i][1], rules.separator_size, "%s", written[i][0]);
        free(text);
    }
}

/* A pattern, or a name, within the test's folder. */
static const char *within(const char *pattern)
{
    return printed("%s/%s", dir.path, pattern);
}

static void write_gzip(const char *name, const char *text)
{
    gzFile file = gzopen(tempdir_file(&dir, name), "wb");
    cr_assert_not_null(file);
    cr_assert_gt(gzwrite(file, text, (unsigned)strlen(text)), 0);
    cr_assert_eq(gzclose(file), Z_OK);
}

/* Files of a folder come in the order of their names' bytes. */
Test(corpus, folders_and_patterns)
{
    use(text_open("gpt2"));
    tempdir_write(&dir, "b.jsonl", "{\"text\":\"b\"}\n", 13);
    write_gzip("B.jsonl.gz", "{\"text\":\"B\"}\n{\"text\":\"BB\"}");
    tempdir_write(&dir, "a.txt", "a", 1);
    tempdir_write(&dir, "notes.md", "x", 1);
    tempdir_write(&dir, ".hidden.txt", "x", 1);
    nd_corpus_files folder = files_of(dir.path);
    cr_assert_eq(folder.count, 3);
    cr_expect_eq(folder.skipped, 1);
    cr_expect_not_null(strstr(folder.list[0].path, "/B.jsonl.gz"));
    cr_expect_not_null(strstr(folder.list[1].path, "/a.txt"));
    cr_expect(folder.list[0].rows && !folder.list[1].rows && folder.list[2].rows);
    assert_ok(encode_files(folder, &out));
    cr_expect_eq(out.counts.documents, 4);
    nd_corpus_files some = files_of(within("[Bb]*"));
    cr_expect_eq(some.count, 2);
    job.threads = 2;
    assert_ok(encode_files(some, &out));
    cr_expect_eq(out.counts.documents, 3);
    /* A file of that name is meant before what the pattern matches. */
    nd_corpus_files named = files_of(tempdir_write(&dir, "[Bb]*", "x", 1));
    cr_expect(named.count == 1 && named.bytes == 1);
    nd_corpus_files_fini(&named);
    nd_corpus_files none = {0};
    assert_fails(nd_corpus_files_add(&none, "/nowhere/*.txt", ND_DATA_AUTO), ND_ERR_DATA,
                 "no file matches");
    assert_fails(nd_corpus_files_add(&none, "/nowhere/a.txt", ND_DATA_AUTO), ND_ERR_DATA,
                 "cannot be read");
    cr_assert_eq(mkfifo(within("pipe.txt"), 0600), 0);
    assert_fails(nd_corpus_files_add(&none, within("pipe.txt"), ND_DATA_AUTO), ND_ERR_DATA,
                 "is no regular file");
    nd_corpus_files_fini(&none);
}

/* The .idx and .mask of a .bin are parts of it, also where a pattern names them. */
Test(corpus, token_files_of_folders_and_patterns)
{
    static const char *const names[] = {"b.bin", "b.idx", "b.mask", "a.bin", "c.md", "a.txt.zst"};
    for (int i = 0; i < 3; i++) { /* a text is there the third time */
        nd_corpus_files files = {0};
        for (int n = 0; n < 5 + i / 2; n++) {
            tempdir_write(&dir, names[n], "x", 1);
        }
        assert_ok(nd_corpus_files_add_tokens(&files, i == 1 ? within("[ab].*") : dir.path));
        cr_expect_eq(files.count, 2);
        cr_expect_not_null(strstr(files.list[0].path, "/a.bin"));
        cr_expect_eq(files.skipped, i != 1, "case %d: %d", i, (int)files.skipped);
        cr_expect_eq(files.text != NULL, i == 2, "case %d: %s", i, files.text);
        nd_corpus_files_fini(&files);
    }
}

/* Links to folders are folders, whatever their names, and a file without a byte is a file. */
Test(corpus, what_is_left_out_of_folders_and_patterns_is_counted)
{
    use(text_open("gpt2"));
    cr_assert_eq(mkdir(within("inner"), 0700), 0);
    cr_assert_eq(symlink("inner", within("link.txt")), 0);
    tempdir_write(&dir, "inner/b.txt", "b", 1);
    tempdir_write(&dir, "a.txt", "a", 1);
    tempdir_write(&dir, "empty.jsonl", "", 0);
    tempdir_write(&dir, "notes.md", "x", 1);
    nd_corpus_files files = files_of(dir.path);
    cr_expect_eq(files.count, 2);
    cr_expect_eq(files.skipped, 1);
    cr_expect_eq(files.folders, 2);
    assert_ok(encode_files(files, &out));
    cr_expect_eq(out.counts.documents, 1);
    files = files_of(within("link.txt"));
    cr_expect_eq(files.count, 1);
    nd_corpus_files_fini(&files);
    files = files_of(within("[ail]*"));
    cr_expect_eq(files.count, 1);
    cr_expect_eq(files.folders, 2);
    nd_corpus_files_fini(&files);
}

/* Or its files would be left out without a word. */
Test(corpus, a_folder_that_a_pattern_cannot_read_is_named)
{
    nd_corpus_files files = {0};
    const char *inner = tempdir_file(&dir, "inner"), *pattern = within("inner/*.txt");
    for (int i = 0; i < 2; i++) { /* a link to itself, a link to nothing */
        cr_assert_eq(symlink(i == 0 ? "inner" : "nowhere", inner), 0);
        assert_fails(nd_corpus_files_add(&files, pattern, ND_DATA_AUTO), ND_ERR_IO,
                     i == 0 ? "Too many levels"
                            : "/inner\", which the pattern names, cannot be read");
        assert_fails(nd_corpus_files_add_tokens(&files, pattern), ND_ERR_IO, "/inner");
        unlink(inner);
    }
    tempdir_write(&dir, "a.txt", "a", 1); /* no folder: passed over */
    inner = tempdir_file(&dir, "inner");
    pattern = within("*/*.txt");
    assert_fails(nd_corpus_files_add(&files, pattern, ND_DATA_AUTO), ND_ERR_DATA,
                 "no file matches");
    cr_assert_eq(mkdir(inner, 0), 0);
    cr_assert_eq(chmod(dir.path, 0755), 0);
    const uid_t user = geteuid();
    cr_assert(user != 0 || seteuid(65534) == 0); /* for whom the folder is closed */
    assert_fails(nd_corpus_files_add(&files, pattern, ND_DATA_AUTO), ND_ERR_IO,
                 "/inner\", which the pattern names, cannot be read: Permission denied");
    cr_assert_eq(seteuid(user), 0);
    cr_assert_eq(rmdir(inner), 0);
    nd_corpus_files_fini(&files);
}

/* By the name alone it would be one text, braces and all. */
Test(corpus, json_under_another_name_and_nul_bytes_need_a_format)
{
    static const struct {
        const char *name, *text, *refused;
    } cases[] = {{"a.json", "{\"text\": \"a\"}\n", "set data.format (--data-format) to jsonl"},
                 {"a.json", " \n[1]\n", "is a JSON array; one object a line"},
                 {"a.json", "{ x", "set data.format (--data-format) to jsonl"},
                 {"a.json", "1\n", NULL},
                 {"a.JSON", "\xef\xbb\xbf[", "is a JSON array; one object a line"},
                 {"part-0", "{\t\"text\": 1}\n", "set data.format (--data-format) to jsonl"},
                 {"part-0", "{}\n", "set data.format (--data-format) to jsonl"},
                 {"part-0", "{% set a %}\n", NULL},
                 {"a.md", "[a]: b\n", NULL},
                 {"a.txt", "{\"text\": 1}\n", NULL},
                 {"a.json", "", NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_corpus_files files = {0};
        const char *path = tempdir_write(&dir, cases[i].name, cases[i].text, strlen(cases[i].text));
        if (cases[i].refused) {
            assert_fails(nd_corpus_files_add(&files, path, ND_DATA_AUTO), ND_ERR_DATA,
                         cases[i].refused);
        } else {
            assert_ok(nd_corpus_files_add(&files, path, ND_DATA_AUTO));
        }
        assert_ok(nd_corpus_files_add(&files, path, ND_DATA_TEXT));
        assert_ok(nd_corpus_files_add(&files, path, ND_DATA_JSONL));
        nd_corpus_files_fini(&files);
    }
    nd_corpus_files files = {0};
    static const char *const binaries[] = {"model.safetensors", "a.npy", "noname"};
    for (size_t i = 0; i < sizeof binaries / sizeof *binaries; i++) {
        const char *path = tempdir_write(&dir, binaries[i], "\x93NUM\0x", 6);
        assert_fails(nd_corpus_files_add(&files, path, ND_DATA_AUTO), ND_ERR_DATA,
                     "has a NUL byte at offset 4, as no text has");
        assert_ok(nd_corpus_files_add(&files, path, ND_DATA_TEXT));
    }
    nd_corpus_files_fini(&files);
    write_gzip("b.json.gz", "{\"text\": 1}");
    assert_fails(nd_corpus_files_add(&files, tempdir_file(&dir, "b.json.gz"), ND_DATA_AUTO),
                 ND_ERR_DATA, "begins as JSON does");
}

Test(corpus, text_in_utf16_is_refused)
{
    static const char *const texts[][2] = {{"\xff\xfe\x61\x01", "UTF-16 (FF FE)"},
                                           {"\xfe\xff\x01\x61", "UTF-16 (FE FF)"}};
    use(text_open("gpt2"));
    for (int i = 0; i < 2; i++) {
        assert_fails(encode_text("a.txt", texts[i][0], &out), ND_ERR_DATA, texts[i][1]);
        rows_fail(texts[i][0], texts[i][1]);
        write_gzip("a.txt.gz", texts[i][0]);
        assert_fails(corpus_encode_path(within("a.txt.gz"), job, &out), ND_ERR_DATA, texts[i][1]);
    }
}

/* Only where the text's own is parsed, and the tokenizer adds one. */
Test(corpus, a_beginning_of_sequence_that_stands_twice_is_counted)
{
    static const char rows[] = "{\"text\": \"<|begin|>x\"}\n{\"text\": \"x <|begin|>\"}\n"
                               "{\"prompt\": \"<|begin|>\", \"completion\": \"y\"}\n";
    use(text_open("llama3"));
    for (int i = 0; i < 4; i++) {
        rules.add_special = i & 1;
        rules.special_in_text = i & 2 ? ND_SPECIAL_PARSE : ND_SPECIAL_TEXT;
        encode_rows(rows);
        cr_expect_eq(out.counts.doubled, i == 3 ? 2 : 0, "%d: %d", i, (int)out.counts.doubled);
        assert_ok(encode_text("a.txt", "<|begin|>x", &out));
        cr_expect_eq(out.counts.doubled, i == 3);
    }
}

/* A file that fails comes after all blocks before it, whatever the threads do. */
Test(corpus, the_earliest_failure_is_reported)
{
    use(text_open("gpt2"));
    write_rows("a.jsonl", 300);
    tempdir_write(&dir, "b.jsonl", "{\"text\":\"x\"}\nbad\n", 17);
    tempdir_write(&dir, "c.jsonl", "\x1f\x8b\x08\x00", 4);
    job.block_bytes = 64;
    for (job.threads = 1; job.threads < 5; job.threads++) {
        assert_fails(corpus_encode_path(dir.path, job, &out), ND_ERR_DATA, "b.jsonl\" line 2");
    }
}

/* A line of 100 MB is a document like any other. */
Test(corpus, a_very_long_line)
{
    enum { SIZE = 100 << 20 };
    char *line = malloc(SIZE + 32);
    cr_assert_not_null(line);
    memcpy(line, "{\"text\":\"", 9);
    for (size_t i = 0; i < SIZE; i++) {
        line[9 + i] = "the end "[i % 8];
    }
    memcpy(line + 9 + SIZE, "\"}\n", 4);
    use(text_open("gpt2"));
    job.threads = 2;
    encode_rows(line);
    cr_expect_eq(out.counts.documents, 1);
    cr_expect_eq(out.counts.text.bytes, SIZE);
    free(line);
    const char *path = tempdir_write(&dir, "a.jsonl", "\n", 1);
    cr_assert_eq(truncate(path, (256 << 20) + 1), 0);
    assert_fails(corpus_encode_path(path, job, &out), ND_ERR_DATA,
                 "line 2 has more than 268435456 bytes");
}

Test(corpus, end_of_text)
{
    int32_t id;
    const char *own = within("tokenizer.json");
    use(text_open("llama3"));
    const nd_tokenizer *tokenizer = job.tokenizer;
    assert_fails(nd_corpus_eod(tokenizer, own, &id), ND_ERR_DATA, "names no end of text");
    cr_expect_eq(nd_corpus_model_end(tokenizer, own, 512), -1);
    static const char *const configs[] = {
        "{\"eos_token\": \"<|eot|>\"}", "{\"eos_token\": {\"content\": \"<|eot|>\"}}",
        "{\"model_max_length\": 1000000000000000019884624838656, \"eos_token\": \"<|eot|>\"}"};
    for (int i = 0; i < 3; i++) {
        tempdir_write(&dir, "tokenizer_config.json", configs[i], strlen(configs[i]));
        assert_ok(nd_corpus_eod(tokenizer, own, &id));
        cr_expect_eq(id, 420);
        cr_expect_eq(nd_corpus_model_end(tokenizer, own, 421), 420);
        cr_expect_eq(nd_corpus_model_end(tokenizer, own, 420), -1, "the model has no such id");
        cr_expect_eq(nd_corpus_model_end(NULL, own, 421), -1, "there is no such file");
    }
    tempdir_write(&dir, "tokenizer_config.json", "{\"eos_token\": \"<none>\"}", 23);
    assert_fails(nd_corpus_eod(tokenizer, own, &id), ND_ERR_DATA, "\"<none>\"");
    tempdir_write(&dir, "tokenizer_config.json", "{", 1);
    assert_fails(nd_corpus_eod(tokenizer, own, &id), ND_ERR_DATA, "line 1");
}

static nd_chat_choice form; /* of the chats of a test */

static const nd_chat_template *own_template; /* of assert_chat and assert_prompt */

static nd_chat_rules chat_rules(nd_chat_choice choice)
{
    nd_chat_rules chat;
    assert_ok(nd_chat_rules_find(NULL, choice, &chat));
    chat.template = own_template ? own_template : chat.template;
    snprintf(chat.bos, sizeof chat.bos, "<s>");
    snprintf(chat.eos, sizeof chat.eos, "</s>");
    return chat;
}

static bool take_space; /* control tokens of use_chat take the white space behind them */

/* A family with these control tokens in the place of its own two, and this form. */
static void use_chat(nd_chat_choice choice, const char *const *names, int count)
{
    nd_tokenizer *tokenizer;
    json_t *file = text_file("llama3"), *added = json_object_get(file, "added_tokens");
    const json_int_t first = json_integer_value(json_object_get(json_array_get(added, 0), "id"));
    json_t *model = json_deep_copy(json_array_get(added, 0));
    json_array_clear(added);
    json_object_del(file, "post_processor");
    for (int i = 0; i < count; i++) {
        json_t *token = json_deep_copy(model);
        json_object_set_new(token, "id", json_integer(first + i));
        json_object_set_new(token, "content", json_string(names[i]));
        json_object_set_new(token, "rstrip", json_boolean(take_space));
        json_array_append_new(added, token);
    }
    assert_ok(text_parse(file, &tokenizer));
    json_decref(model);
    json_decref(file);
    use(tokenizer);
    form = choice;
    rules.chat = chat_rules(form);
}

/* Without a tokenizer_config.json the first one of these that the tokenizer has. */
Test(corpus, known_ends_of_text)
{
    static const char *const names[] = {"<|end_of_text|>", "<|endoftext|>", "</s>"};
    const char *path = tempdir_file(&dir, "tokenizer.json");
    int32_t id;
    for (int i = 0; i < 3; i++) {
        use_chat(ND_CHOOSE_CHAT_NONE, &names[i], 3 - i);
        assert_ok(nd_corpus_eod(job.tokenizer, path, &id));
        cr_expect_eq(id, nd_tokenizer_find(job.tokenizer, names[i], strlen(names[i])), "%d", id);
    }
}

static void use_chatml(void)
{
    use_chat(ND_CHOOSE_CHAT_CHATML, (const char *const[]){"<|im_start|>", "<|im_end|>"}, 2);
}

static void use_llama3(void)
{
    use_chat(ND_CHOOSE_CHAT_LLAMA3,
             (const char *const[]){"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                                   "<|eot_id|>"},
             4);
}

static nd_encoder *make_encoder(nd_special_in_text special)
{
    const nd_encode_options options = {.special_in_text = special};
    nd_encoder *encoder;
    assert_ok(nd_encoder_create(job.tokenizer, &options, &encoder));
    return encoder;
}

/* The row has the ids that the rendered text has when its control tokens are parsed, and the ids of
 * the marked parts of `rendered`, between \1 and \2, count. */
static void assert_chat(const char *row, const char *rendered)
{
    nd_encoder *encoder = make_encoder(ND_SPECIAL_PARSE);
    size_t at = 0;
    bool counts = false;
    rules.chat = chat_rules(form);
    job.eod = 5;
    encode_rows(row);
    for (const char *p = rendered; *p; counts = !counts) {
        const int32_t *ids;
        size_t count, n = strcspn(p, "\1\2");
        assert_ok(nd_encode(encoder, p, n, &ids, &count));
        cr_assert_leq(at + count, out.ids.count);
        cr_expect_eq(memcmp(ids, out.ids.data + at, count * sizeof *ids), 0, "%.*s", (int)n, p);
        for (size_t i = at; i < at + count; i++) {
            bool ignored = false;
            for (size_t s = 0; s < out.spans.count; s += 2) {
                ignored |= (int32_t)i >= out.spans.data[s] && (int32_t)i < out.spans.data[s + 1];
            }
            cr_expect_eq(ignored, !counts, "token %zu of %.*s", i, (int)n, p);
        }
        at += count;
        p += n + (p[n] != '\0');
    }
    cr_expect_eq(at, out.ids.count);
    nd_encoder_destroy(encoder);
}

Test(corpus, messages_of_llama3)
{
    use_llama3();
    assert_chat(
        ROW(SAYS("system", " be good ") ", " SAYS(
            "user", "2+2?") ", {\"content\": \"it's 4\\n\", \"role\": "
                            "\"assistant\"}, " SAYS("user", "thanks") ", " SAYS("assistant", "")),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe good<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\1it's 4<|eot_id|>\2"
        "<|start_header_id|>user<|end_header_id|>\n\nthanks<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\1<|eot_id|>");
}

/* As transformers does: str.strip takes more away than blanks of ASCII. */
Test(corpus, messages_of_llama3_are_stripped_as_by_python)
{
    static const char *const spaces[] = {
        "\\u001c", "\\u001f", "\\u0085", "\\u00a0",  "\\u2003",
        "\\u2028", "\\u202f", "\\u3000", "\xc2\xa0", "\\t\\n\\u000b\\f\\r "};
    use_llama3();
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        const char *row = printed(ROW(SAYS("assistant", "%s%sa%sb%s")), spaces[i], spaces[i],
                                  "\xc3\xa9", spaces[i]);
        assert_chat(row, "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n"
                         "\1a\xc3\xa9"
                         "b<|eot_id|>");
    }
    assert_chat(ROW(SAYS("assistant", "\\u200b ")),
                "<|begin_of_text|><|start_header_id|>assistant<|end_header_id|>\n\n"
                "\1\xe2\x80\x8b<|eot_id|>");
}

/* Rows of messages follow the rules of all rows, whatever other keys they have. */
Test(corpus, messages_are_read_as_other_rows_are)
{
    static const char *const rows[] = {
        "{\"prompt\": \"x\", \"prompt_id\": \"1\", \"messages\": [{\"role\": "
        "\"assistant\", "
        "\"content\": \"a b\"}]}\n",
        "{\"text\": \"x\", \"messages\": [ {\"n\": [NaN, {}], \"role\": \"user\", \"role\": "
        "\"assistant\", \"content\": \"a\\u0020b\"} ] }\n"};
    use_chatml();
    for (size_t i = 0; i < 2; i++) {
        assert_chat(rows[i], "<|im_start|>assistant\n\1a b<|im_end|>\2\n");
    }
    assert_chat(ROW2(SAYS("user", "the end"), SAYS("assistant", "yes ")),
                "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n\1yes "
                "<|im_end|>\2\n");
    encode_rows(ROW(SAYS("assistant", "\\udc00\xff")));
    cr_expect_eq(out.counts.lone, 1);
    cr_expect_eq(out.counts.text.invalid, 1);
}

/* A weight of 0 leaves a turn out of the loss; another key of a message is noted. */
Test(corpus, weights_of_messages)
{
    static const struct {
        const char *key, *says;
    } bad[] = {
        {"\"weight\": 0.5", "0.5"}, {"\"weight\": \"0\"", "0 or 1"}, {"\"weight\": true", "true"}};
    use_chatml();
    assert_chat("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"weight\": 0.0}, "
                "{\"role\": \"assistant\", \"content\": \"a\", \"weight\": 0}, "
                "{\"role\": \"assistant\", \"content\": \"b\", \"weight\": 1.0}, "
                "{\"weight\": 1, \"role\": \"assistant\", \"content\": \"b\"}, "
                "{\"role\": \"user\", \"content\": \"c\", \"weight\": 1}, "
                "{\"role\": \"assistant\", \"content\": \"d\", \"weight\": null}]}\n",
                "<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
                "<|im_start|>assistant\n\1b<|im_end|>\2\n"
                "<|im_start|>assistant\n\1b<|im_end|>\2\n"
                "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n\1d<|im_end|>\2\n");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        rows_fail(printed(ROW("{\"role\": \"assistant\", \"content\": \"a\", %s}"), bad[i].key),
                  bad[i].says);
    }
    encode_rows("{\"messages\": [{\"role\": \"user\", \"weight\": 0, \"content\": \"a\"}, "
                "{\"role\": \"assistant\", \"content\": \"b\", \"train\": 1, \"name\": "
                "2}]}\n{\"messages\": []}\n");
    cr_expect_str_eq(out.counts.stray, "train");
    cr_expect_eq(out.counts.empty, 1);
}

/* A post-processor that ends each text with the end of text: it stands there once. */
Test(corpus, an_end_of_text_of_the_post_processor_is_not_added_again)
{
    json_t *file = text_file("llama3");
    nd_tokenizer *tokenizer;
    const json_t *token = json_array_get(json_object_get(file, "added_tokens"), 0);
    const char *end = json_string_value(json_object_get(token, "content"));
    const json_int_t id = json_integer_value(json_object_get(token, "id"));
    json_object_set_new(
        file, "post_processor",
        json_pack("{s:s, s:[{s:{s:s, s:i}}, {s:{s:s, s:i}}], s:[], s:{s:{s:s, s:[I], s:[s]}}}",
                  "type", "TemplateProcessing", "single", "Sequence", "id", "A", "type_id", 0,
                  "SpecialToken", "id", end, "type_id", 0, "pair", "special_tokens", end, "id", end,
                  "ids", id, "tokens", end));
    assert_ok(text_parse(file, &tokenizer));
    use(tokenizer);
    job.eod = (int32_t)id;
    for (int special = 0; special < 2; special++) {
        rules.add_special = special;
        encode_rows("{\"text\": \"a\"}\n{\"text\": \"b\"}\n");
        cr_expect_eq(out.ids.count, 4, "%zu", out.ids.count);
        cr_expect(out.ids.data[1] == id && out.ids.data[3] == id);
    }
    json_decref(file);
}

/* The newline of the form and those that a content begins with are one token, as in the rendered
 * text; it counts with an assistant's content. `first`: the first id that counts. */
static void assert_newlines(const char *row, const char *rendered, const char *first)
{
    nd_encoder *encoder = make_encoder(ND_SPECIAL_PARSE);
    encode_rows(row);
    text_expect_ids(encoder, rendered, out.ids.data, out.ids.count);
    cr_assert_gt(out.spans.count, 1);
    cr_expect_eq(out.spans.data[0], 0);
    cr_expect_eq(out.ids.data[out.spans.data[1]],
                 nd_tokenizer_find(job.tokenizer, first, strlen(first)), "%s", rendered);
    cr_expect_eq(out.counts.text.bytes, (int64_t)strlen(rendered) - 44); /* four control tokens */
    nd_encoder_destroy(encoder);
}

Test(corpus, a_newline_that_begins_a_content_joins_the_one_before_it)
{
    static const char newlines[] = "\xc4\x8a\xc4\x8a"; /* two, as the file writes them */
    use_chatml();
    assert_newlines(ROW2(SAYS("user", "\\n\\nthe end"), SAYS("assistant", "\\nyes")),
                    "<|im_start|>user\n\n\nthe end<|im_end|>\n<|im_start|>assistant\n\nyes"
                    "<|im_end|>\n",
                    newlines);
    assert_newlines(ROW2(SAYS("user", ""), SAYS("assistant", "")),
                    "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n",
                    "<|im_end|>");
}

static nd_status encode_prompt(const char *messages, nd_ids *ids)
{
    const nd_chat_rules own = chat_rules(form);
    nd_encoder *encoder = make_encoder(ND_SPECIAL_TEXT);
    nd_chat chat;
    assert_ok(nd_chat_find(job.tokenizer, &own, &chat));
    const nd_status status = nd_chat_prompt(&chat, encoder, messages, strlen(messages), ids);
    nd_encoder_destroy(encoder);
    return status;
}

/* The prompt has the ids that the rendered text has when its control tokens are parsed. */
static void assert_prompt(const char *messages, const char *rendered)
{
    nd_encoder *encoder = make_encoder(ND_SPECIAL_PARSE);
    nd_ids ids = {0};
    assert_ok(encode_prompt(messages, &ids));
    text_expect_ids(encoder, rendered, ids.data, ids.count);
    cr_expect_eq(encode_prompt("[]", &ids), ND_ERR_DATA);
    cr_expect_eq(encode_prompt("[{}]", &ids), ND_ERR_DATA);
    free(ids.data);
    nd_encoder_destroy(encoder);
}

static void assert_prompt_fails(const char *messages, const char *words)
{
    nd_ids ids = {0};
    assert_fails(encode_prompt(messages, &ids), ND_ERR_DATA, words);
    free(ids.data);
}

Test(corpus, a_prompt_of_messages_ends_where_the_assistant_begins)
{
    use_llama3();
    assert_prompt(LIST(SAYS("user", "2+2? ")),
                  "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n");
    use_chatml();
    assert_prompt(LIST(SAYS("user", "the end")),
                  "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n");
}

/* As scripts/chat_templates.py renders Qwen3's template with transformers. */
Test(corpus, templates_that_think)
{
    const nd_chat_template thinks = {
        .sha256 = "", .form = &nd_chat_forms[1], .does = ND_THINKS | ND_OWN_TOOLS};
    use_chatml();
    own_template = &thinks;
    assert_chat(ROW(SAYS("user", "a") ", " SAYS("assistant", "b") ", " SAYS("user", "c") ", " SAYS(
                    "assistant", "\\n\\nd")),
                "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\1b<|im_end|>\2\n"
                "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
                "\1d<|im_end|>\2\n");
    assert_chat(ROW(SAYS("assistant", "b")), "<|im_start|>assistant\n\1b<|im_end|>\2\n");
    assert_chat(ROW(SAYS("user", "a") ", " SAYS("assistant", "b") ", " SAYS("assistant", "c")),
                "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\1b<|im_end|>\2\n"
                "<|im_start|>assistant\n<think>\n\n</think>\n\n\1c<|im_end|>\2\n");
    assert_prompt(LIST(SAYS("user", "a")),
                  "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
    assert_prompt_fails(LIST(SAYS("assistant", "x</think>y")), "</think>");
    assert_prompt_fails("[{\"role\": \"assistant\", \"content\": \"y\", "
                        "\"reasoning_content\": \"x\"}]",
                        "\"reasoning_content\"");
    assert_prompt_fails(LIST(SAYS("tool", "x")), "the role \"tool\"");
    own_template = NULL;
    assert_prompt(LIST(SAYS("tool", "a")),
                  "<|im_start|>tool\na<|im_end|>\n<|im_start|>assistant\n");
}

/* A form that refuses a system turn and ends a conversation. */
Test(corpus, forms_that_take_turns_refuse_and_end)
{
    static const char *const names[] = {"<s>", "</s>", "[INST]", "[/INST]"};
    static const char talk[] =
        "[" SAYS("user", " a") ", " SAYS("assistant", "b") ", " SAYS("user", "c ") "]";
    const nd_chat_form turns = {.begin = "",
                                .user_open = "{bos}[INST]",
                                .user_close = "[/INST]",
                                .open = " ",
                                .close = " {eos}",
                                .prompt = "",
                                .end = "{eos}",
                                .strips = true};
    const nd_chat_template own = {.sha256 = "", .form = &turns};
    nd_chat chat;
    use_chat(ND_CHOOSE_CHAT_CHATML, names, 4);
    own_template = &own;
    assert_prompt(talk, "<s>[INST]a[/INST] b </s><s>[INST]c[/INST]");
    assert_prompt_fails(LIST(SAYS("system", "a")), "put its text into that of the first user");
    assert_prompt_fails(LIST(SAYS("assistant", "a")), "take turns");
    assert_prompt_fails(LIST(SAYS("tool", "a")), "the role \"tool\"");
    assert_chat(ROW2(SAYS("user", "a"), SAYS("assistant", " b")),
                "<s>[INST]a[/INST]\1 b </s>\2</s>");
    rules.chat.eos[0] = '\0';
    assert_fails(nd_chat_find(job.tokenizer, &rules.chat, &chat), ND_ERR_DATA,
                 "tokenizer_config.json beside the tokenizer names no eos_token, which its chat "
                 "template writes; add \"eos_token\" there");
    own_template = NULL;
}

/* As in Phi 3's form: what stands behind such a token has no ids, in a content either. */
Test(corpus, control_tokens_may_take_the_white_space_behind_them)
{
    static const char *const names[] = {"<|user|>", "<|assistant|>", "<|end|>"};
    const nd_chat_template own = {.sha256 = "", .form = &nd_chat_forms[7]};
    take_space = true;
    use_chat(ND_CHOOSE_CHAT_CHATML, names, 3);
    own_template = &own;
    assert_prompt(LIST(SAYS("user", " \\n a ")), "<|user|>\n \n a <|end|>\n<|assistant|>\n");
    assert_chat(ROW2(SAYS("user", "a"), SAYS("assistant", " b ")),
                "<|user|>a<|end|><|assistant|>\1b <|end|>\2</s>");
}

/* The template of SmolLM2-135M-Instruct, as its tokenizer_config.json has it; %s: a newline. */
#define SMOLLM2                                                                                    \
    "{%% for message in messages %%}{%% if loop.first and messages[0]['role'] != 'system' %%}"     \
    "{{ '<|im_start|>system%sYou are a helpful AI assistant named SmolLM, trained by Hugging "     \
    "Face<|im_end|>%s' }}{%% endif %%}{{'<|im_start|>' + message['role'] + '%s' + "                \
    "message['content'] + '<|im_end|>' + '%s'}}{%% endfor %%}{%% if add_generation_prompt %%}"     \
    "{{ '<|im_start|>assistant%s' }}{%% endif %%}"
#define SMOLLM2_SYSTEM                                                                             \
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "         \
    "Face<|im_end|>\n"

static const nd_chat_template *find_template(nd_chat_choice format, bool *foreign)
{
    assert_ok(nd_chat_rules_find(tempdir_file(&dir, "tokenizer.json"), format, &rules.chat));
    *foreign = rules.chat.foreign;
    return rules.chat.template && rules.chat.template->sha256[0] ? rules.chat.template : NULL;
}

Test(corpus, a_chat_template_is_known_by_its_text)
{
    char text[1024], file[2048];
    bool foreign = true;
    cr_expect_null(find_template(ND_CHOOSE_CHAT_CHATML, &foreign));
    cr_expect_not(foreign, "a tokenizer without a template");
    snprintf(text, sizeof text, SMOLLM2 "\n", "\n", "\n", "\n", "\n", "\n");
    tempdir_write(&dir, "chat_template.jinja", text, strlen(text));
    const nd_chat_template *own = find_template(ND_CHOOSE_CHAT_CHATML, &foreign);
    cr_assert(own && !foreign && own->system && !own->prefix);
    cr_expect_null(find_template(ND_CHOOSE_CHAT_LLAMA3, &foreign));
    cr_expect(foreign, "data.chat_format names another form");
    cr_expect_eq(find_template(ND_CHOOSE_CHAT_MODEL, &foreign), own);
    cr_expect_not(foreign);
    cr_expect_null(find_template(ND_CHOOSE_CHAT_NONE, &foreign));
    cr_expect_not(foreign);
    tempdir_write(&dir, "chat_template.jinja", text + 1, strlen(text) - 1);
    cr_expect_null(find_template(ND_CHOOSE_CHAT_CHATML, &foreign));
    cr_expect(foreign, "another text");
    assert_fails(
        nd_chat_rules_find(tempdir_file(&dir, "tokenizer.json"), ND_CHOOSE_CHAT_MODEL, &rules.chat),
        ND_ERR_DATA, "none that is known; scripts/encode_rows.py");
    static const char *const ends[] = {"", "\r\n", " ", "\n\n"}; /* Jinja drops one newline */
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, SMOLLM2 "%s", "\n", "\n", "\n", "\n", "\n", ends[i]);
        tempdir_write(&dir, "chat_template.jinja", text, strlen(text));
        (void)find_template(ND_CHOOSE_CHAT_CHATML, &foreign);
        cr_expect_eq(foreign, i >= 2, "end %d", i);
    }
    unlink(tempdir_file(&dir, "chat_template.jinja"));
    static const char *const newlines[] = {"\\n", "\\\\n"};
    static const char *const forms[] = {
        "{\"chat_template\": \"%s\"}",
        "{\"chat_template\": [{\"name\": \"tools\", \"template\": \"{%% x %%}\"}, "
        "{\"name\": \"default\", \"template\": \"%s\"}], \"model_max_length\": 1e30}"};
    for (int i = 0; i < 4; i++) {
        const char *n = newlines[i / 2];
        snprintf(text, sizeof text, SMOLLM2, n, n, n, n, n);
        snprintf(file, sizeof file, i % 2 ? forms[1] : forms[0], text);
        tempdir_write(&dir, "tokenizer_config.json", file, strlen(file));
        cr_expect_eq(find_template(ND_CHOOSE_CHAT_CHATML, &foreign), own, "%s", file);
    }
    tempdir_write(&dir, "tokenizer_config.json", "{", 1);
    assert_fails(nd_chat_rules_find(tempdir_file(&dir, "tokenizer.json"), ND_CHOOSE_CHAT_CHATML,
                                    &rules.chat),
                 ND_ERR_DATA, "tokenizer_config.json");
}

static const char chat_rows[] = /* as they are written */
#define ND_CHAT_FORM(...)     #__VA_ARGS__ "\n"
#define ND_CHAT_TEMPLATE(...) #__VA_ARGS__ "\n"
#include "trainer/corpus/chat_templates.def"
    ;

/* Another row gives messages other ids, and old token caches must not be used then. */
Test(corpus, rows_of_chat_templates_belong_to_a_version_of_the_code)
{
    static const char sum[] = "8509b91417a73f1c4428b51fd39999dc1bcb13d8141b385c65890b6d11c5a5aa";
    char hex[65];
    assert_ok(nd_sha256(chat_rows, sizeof chat_rows - 1, hex));
    cr_expect(ND_TEXT_VERSION == 5 && strcmp(hex, sum) == 0,
              "check the rows (scripts/chat_templates.py), raise ND_TEXT_VERSION where one that "
              "was there has changed, and put that and %s here",
              hex);
}

/* As apply_chat_template renders them (scripts/chat_templates.py compares with it). */
Test(corpus, a_known_template_adds_its_system_turn)
{
    const nd_chat_template dated = {"", &nd_chat_forms[0], "", "Date: today\n\n", ND_OWN_TOOLS};
    char text[1024];
    bool foreign;
    use_chatml();
    snprintf(text, sizeof text, SMOLLM2, "\n", "\n", "\n", "\n", "\n");
    tempdir_write(&dir, "chat_template.jinja", text, strlen(text));
    own_template = find_template(ND_CHOOSE_CHAT_CHATML, &foreign);
    cr_assert_not_null(own_template);
    assert_chat(ROW2(SAYS("user", "the end"), SAYS("assistant", "yes")),
                SMOLLM2_SYSTEM "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n\1yes"
                               "<|im_end|>\2\n");
    assert_chat(ROW2(SAYS("system", ""), SAYS("assistant", "yes")),
                "<|im_start|>system\n<|im_end|>\n<|im_start|>assistant\n\1yes<|im_end|>\2\n");
    assert_prompt(LIST(SAYS("user", "the end")),
                  SMOLLM2_SYSTEM "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n");
    use_llama3();
    own_template = &dated;
    assert_prompt(LIST(SAYS("user", "2+2?")),
                  "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate: "
                  "today\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n");
    assert_prompt(LIST2(SAYS("system", " be good"), SAYS("system", "a")),
                  "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate: "
                  "today\n\nbe good<|eot_id|><|start_header_id|>system<|end_header_id|>\n\na"
                  "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    assert_prompt_fails(LIST(SAYS("tool", "4")), "a message has the role \"tool\"");
    own_template = NULL;
    assert_prompt(LIST2(SAYS("tool", "4"), SAYS("ipython", "5")),
                  "<|begin_of_text|><|start_header_id|>tool<|end_header_id|>\n\n4<|eot_id|>"
                  "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>"
                  "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

/* A row that is left out leaves nothing behind, also where its first span went on with the last one
 * of the row before. */
Test(corpus, messages_that_are_left_out_change_no_other_row)
{
#define GOOD  ROW2(SAYS("user", "the end"), SAYS("assistant", "yes"))
#define BAD   ROW2(SAYS("user", "it was"), "{\"role\": \"user\"}")
#define AFTER "{\"text\": \"a b c d e f\"}\n"
    use_chatml();
    job.skip_bad = 1;
    assert_ok(encode_text("a.jsonl", GOOD AFTER, &whole));
    encode_rows(GOOD BAD AFTER);
    cr_expect_eq(out.counts.bad, 1);
    corpus_assert_equal(&whole, &out, "a bad row between two good ones");
}

/* NULL: they are taken. An answer that is a call would count as an empty one. */
Test(corpus, messages_that_are_refused)
{
    static const struct {
        const char *row, *words;
    } cases[] = {
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{}]}]}\n",
         "a message has \"tool_calls\""},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [1]}]}\n",
         "scripts/encode_rows.py"},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", \"function_call\": "
         "{\"name\": \"f\"}}]}\n",
         "a message has \"function_call\""},
        {"{\"tools\": [{}], \"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n",
         "line 1: it has \"tools\""},
        {"{\"tools\": \"[{}]\", \"messages\": []}\n", "it has \"tools\""},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"tool_calls\": [ ], "
         "\"function_call\": null}], \"tools\": { }}\n",
         NULL},
        {"{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\", \"tool_calls\": null}], "
         "\"tools\": \"\"}\n",
         NULL},
        {"{\"messages\": {}}\n", "is not a list"},
        {"{\"messages\": [1]}\n", "a message lacks"},
        {"{\"messages\": [{\"role\": \"user\"}]}\n", "a message lacks"},
        {ROW(SAYS("asistant", "x")),
         "line 1: a message has the role \"asistant\"; it must be system, user, assistant, tool or "
         "ipython"},
        {"{\"conversations\": [{\"from\": \"human\", \"value\": \"x\"}], \"id\": 1}\n",
         "it has \"conversations\"; rename this key to \"messages\""},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [\"x\"]}]}\n", "is no string"}};
    use_chatml();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].words) {
            rows_fail(cases[i].row, cases[i].words);
        } else {
            encode_rows(cases[i].row);
        }
    }
    rules.chat = chat_rules(ND_CHOOSE_CHAT_LLAMA3);
    rows_fail("{\"messages\": []}\n",
              "no token <|begin_of_text|>, which this data.chat_format needs; name one that has it "
              "with data.tokenizer (--tokenizer), or give another --chat-format");
    rules.chat = chat_rules(ND_CHOOSE_CHAT_NONE);
    rows_fail("{\"messages\": []}\n", "data.chat_format");
    rows_fail("{\"messages\": [], \"prompt\": \"a\"}\n",
              "only one of \"prompt\" and \"completion\"; set data.chat_format");
}
