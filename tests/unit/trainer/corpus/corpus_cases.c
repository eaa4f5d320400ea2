// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/trainer/corpus/corpus_cases.h"

#include <stdlib.h>
#include <string.h>

#include "trainer/corpus/token_file.h"

nd_tokenizer *corpus_tokenizer(const char *family)
{
    nd_tokenizer *tokenizer;
    json_t *file = text_file(family), *added = json_object_get(file, "added_tokens");
    for (size_t i = json_array_size(added); i-- > 0;) {
        const json_t *token = json_array_get(added, i);
        if (i > 1 || json_is_true(json_object_get(token, "lstrip")) ||
            json_is_true(json_object_get(token, "rstrip"))) {
            json_array_remove(added, i);
        }
    }
    assert_ok(text_parse(file, &tokenizer));
    json_decref(file);
    return tokenizer;
}

static nd_status add_piece(void *context, const nd_corpus_piece *piece, uint64_t bytes)
{
    corpus_result *out = context;
    const int32_t before = (int32_t)out->ids.count;
    assert_ok(nd_ids_add(&out->ids, piece->ids.data, piece->ids.count));
    for (size_t i = 0; i < piece->ends.count; i++) {
        int32_t end = before + piece->ends.data[i];
        assert_ok(nd_ids_add(&out->ends, &end, 1));
    }
    for (size_t i = 0; i < piece->spans.count; i++) {
        int32_t place = before + piece->spans.data[i];
        assert_ok(nd_ids_add(&out->spans, &place, 1));
    }
    return ND_OK;
}

void corpus_free(corpus_result *result)
{
    free(result->ids.data);
    free(result->ends.data);
    free(result->spans.data);
    *result = (corpus_result){0};
}

void corpus_piece_free(nd_corpus_piece *piece)
{
    free(piece->ids.data);
    free(piece->ends.data);
    free(piece->spans.data);
    *piece = (nd_corpus_piece){0};
}

static const nd_corpus_rules plain = {.json_key = "text", .pairs = true};

nd_token_cache_request corpus_request(const tempdir *folder, const char *tokenizer, int64_t vocab)
{
    return (nd_token_cache_request){.job = {.rules = &plain, .threads = 1},
                                    .tokenizer = tokenizer,
                                    .folder = folder->path,
                                    .vocab = vocab};
}

nd_status corpus_encode(nd_corpus_job job, corpus_result *out)
{
    corpus_free(out);
    job.rules = job.rules ? job.rules : &plain;
    job.threads = job.threads ? job.threads : 1;
    job.eod = job.eod ? job.eod : -1;
    job.context = out;
    job.write = add_piece;
    return nd_corpus_encode(&job, &out->counts);
}

nd_status corpus_encode_path(const char *path, nd_corpus_job job, corpus_result *out)
{
    nd_corpus_files files = {0};
    assert_ok(nd_corpus_files_add(&files, path, ND_DATA_AUTO));
    job.files = &files;
    const nd_status status = corpus_encode(job, out);
    nd_corpus_files_fini(&files);
    return status;
}

nd_status corpus_write(const char *prefix, int32_t vocab, const nd_corpus_piece *pieces, int count)
{
    nd_token_files files;
    nd_status status = nd_token_files_open(prefix, vocab, NULL, &files);
    for (int i = 0; i < count && status == ND_OK; i++) {
        status = nd_token_files_write(&files, &pieces[i]);
    }
    status = status == ND_OK ? nd_token_files_commit(&files) : status;
    nd_token_files_fini(&files);
    return status;
}

void corpus_set_byte(const char *path, off_t at, char byte)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void assert_list(const nd_ids *a, const nd_ids *b, const char *what)
{
    cr_assert_eq(a->count, b->count, "%s: %zu and %zu", what, a->count, b->count);
    cr_assert(a->count == 0 || memcmp(a->data, b->data, a->count * sizeof *a->data) == 0, "%s",
              what);
}

void corpus_assert_equal(const corpus_result *a, const corpus_result *b, const char *what)
{
    assert_list(&a->ids, &b->ids, what);
    assert_list(&a->ends, &b->ends, what);
    assert_list(&a->spans, &b->spans, what);
}
