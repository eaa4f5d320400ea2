// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include "tests/support/skip.h"
#include "tests/support/synced.h"
#include "tests/unit/trainer/weights/hf_model.h"
#include "tests/unit/trainer/weights/hf_shape.h"
#include "trainer/weights/safetensors.h"

TestSuite(hf_writer, .init = hf_setup, .fini = hf_teardown);

/* While it is set, files take no room: none is reserved, enough seems to be free, and pieces of 1
 * MiB or more are not written. The calls below stand before those of libc. */
static bool sparse;

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return sparse && size >= 1 << 20 ? (ssize_t)size
                                     : syscall(SYS_pwrite64, fd, data, size, offset);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    errno = EOPNOTSUPP;
    return sparse ? -1 : (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

int statvfs(const char *restrict path, struct statvfs *restrict out)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int code = fd < 0 ? -1 : fstatvfs(fd, out);
    if (fd >= 0) {
        close(fd);
    }
    if (code == 0 && sparse) {
        out->f_bavail = (fsblkcnt_t)1 << 40;
    }
    return code;
}

static int data_syncs;

int fdatasync(int fd)
{
    data_syncs++;
    errno = sync_code;
    return sync_code ? -1 : (int)syscall(SYS_fdatasync, fd);
}

static int entries_in(const char *folder)
{
    hf_shell("ls -A %s | wc -l", folder);
    return atoi(shell_output);
}

static void assert_reads_back(const char *folder, const nd_hf_writer_options *options)
{
    static float values[65536];
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_check(reader));
    cr_assert_eq(nd_hf_reader_is_bf16(reader), options->dtype == ND_DTYPE_BF16);
    const nd_shape *shape = nd_hf_reader_shape(reader);
    cr_assert_eq(shape->ffn, options->shape.ffn);
    cr_assert_eq(shape->tied, options->shape.tied);
    cr_assert_eq(shape->rope.type, ND_ROPE_LLAMA3);
    cr_assert_eq(nd_hf_reader_read(reader, "lm_head.weight", 0, 1, values),
                 shape->tied ? ND_ERR_DATA : ND_OK);
    for (int i = 0; i < hf_tensor_count; i++) {
        int64_t n = hf_count_of(&hf_tensors[i]);
        const int64_t slices[][2] = {{0, n}, {n / 4, n - n / 3}, {n - 1, n}, {n, n}};
        for (int s = 0; s < 4; s++) {
            int64_t begin = slices[s][0], count = slices[s][1] - begin;
            assert_ok(nd_hf_reader_read(reader, hf_tensors[i].name, begin, count, values));
            for (int64_t e = 0; e < count; e++) {
                float expected = hf_value_of(i, begin + e);
                if (options->dtype == ND_DTYPE_BF16) {
                    expected = nd_bf16_to_f32(nd_bf16_from_f32(expected));
                }
                cr_assert_eq(values[e], expected, "%s[%ld]", hf_tensors[i].name, (long)(begin + e));
            }
        }
    }
    nd_hf_reader_close(reader);
}

Test(hf_writer, what_is_written_reads_back)
{
    const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
    for (int k = 0; k < 4; k++) {
        nd_hf_writer_options o = hf_options_of(k & 1, dtypes[k >> 1]);
        const char *folder = hf_write_model(printed("m%d", k), &o);
        assert_reads_back(folder, &o);
        hf_shell("grep -q '\"torch_dtype\": \"%s' %s/config.json", k > 1 ? "bf" : "float32",
                 folder);
        cr_assert_eq(entries_in(folder), 5); /* config, weights, tokenizer, its config, checksums */
        cr_assert_eq(entries_in(hf_dir.path), k + 1, "a temporary folder is left");
    }
}

/* More elements in one call than are converted at a time. */
Test(hf_writer, one_long_piece)
{
    enum { ROWS = 6251, COLS = 24, N = ROWS * COLS };
    static const char embedding[] = "model.embed_tokens.weight";
    static float values[N], back[N];
    nd_hf_writer *writer;
    nd_hf_reader *reader;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_BF16);
    o.shape.vocab = ROWS;
    hf_list_tensors(&o.shape);
    for (int i = 0; i < N; i++) {
        values[i] = nd_bf16_to_f32(nd_bf16_from_f32(hf_value_of(0, i)));
    }
    const char *folder = tempdir_file(&hf_dir, "m");
    assert_ok(nd_hf_writer_open(folder, &o, &writer));
    for (int i = 0; i < hf_tensor_count; i++) {
        const int64_t n = hf_count_of(&hf_tensors[i]);
        assert_ok(n == N ? nd_hf_writer_write(writer, embedding, 0, N, values)
                         : hf_write_piece(writer, i, 0, n));
    }
    assert_ok(nd_hf_writer_commit(writer));
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_read(reader, embedding, 0, N, back));
    cr_assert_eq(memcmp(values, back, sizeof back), 0);
    nd_hf_reader_close(reader);
}

/* A tensor of more than 4 GiB: its last elements lie where they belong, and are read from there. */
Test(hf_writer, offsets_above_32_bits)
{
    enum { N = 1000 };
    static const char embedding[] = "model.embed_tokens.weight";
    const int64_t rows = ((int64_t)1 << 30) / 96 + N;
    const int64_t count = 96 * rows, places[] = {0, 1 << 29, count - N};
    float values[N], back[N];
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_F32);
    nd_safetensors_list list;
    const char *folder = printed("%s/m", hf_dir.path);
    const char *path = printed("%s/model.safetensors", folder);
    cr_assert_eq(mkdir(folder, 0777), 0);
    o.inside = sparse = true;
    o.shape.vocab = rows;
    o.shape.hidden = 96;
    assert_ok(nd_hf_writer_open(folder, &o, &writer));
    for (int p = 0; p < 3; p++) {
        for (int i = 0; i < N; i++) {
            values[i] = (float)(p * N + i + 1);
        }
        assert_ok(nd_hf_writer_write(writer, embedding, places[p], N, values));
    }
    nd_hf_writer_abort(writer);
    assert_ok(nd_shape_write(&o.shape, "float32", printed("%s/config.json", folder)));
    nd_hf_reader *reader;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_ok(nd_safetensors_read_header(fd, path, &list));
    assert_ok(nd_hf_reader_open(folder, &reader));
    for (int p = 0; p < 3; p++) {
        off_t at = (off_t)list.tensors[0].begin + 4 * places[p];
        cr_assert_eq(pread(fd, back, sizeof back, at), (ssize_t)sizeof back);
        cr_assert_eq(back[0], (float)(p * N + 1), "byte %ld of the file", (long)at);
        assert_ok(nd_hf_reader_read(reader, embedding, places[p], N, values));
        cr_assert_arr_eq(values, back, sizeof back);
    }
    nd_hf_reader_close(reader);
    nd_safetensors_list_fini(&list);
    close(fd);
}

/* One sync at the end would take longer than other ranks wait. */
Test(hf_writer, what_waits_for_the_disk_is_at_most_256_mib)
{
    enum { N = 1 << 20, PIECES = 64, HIDDEN = 32 };
    static float values[N];
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_F32);
    o.shape.vocab = PIECES * N / HIDDEN;
    o.shape.hidden = HIDDEN;
    sparse = true;
    assert_ok(nd_hf_writer_open(tempdir_file(&hf_dir, "m"), &o, &writer));
    for (int p = 0; p < PIECES; p++) {
        cr_assert_eq(data_syncs, 0, "piece %d", p);
        sync_code = p == PIECES - 1 ? EIO : 0;
        const nd_status status =
            nd_hf_writer_write(writer, "model.embed_tokens.weight", (int64_t)p * N, N, values);
        cr_assert_eq(status, sync_code ? ND_ERR_CANTCREATE : ND_OK);
    }
    sync_code = 0;
    assert_ok(nd_hf_writer_write(writer, "model.norm.weight", 0, HIDDEN, values));
    cr_expect_eq(data_syncs, 1);
    nd_hf_writer_abort(writer);
}

/* A disk that fails then ends the command, and nothing is left of the file. */
Test(hf_writer, a_gguf_file_is_on_the_disk_before_it_has_its_name)
{
    sync_word = "m.gguf";
    sync_code = EIO;
    cr_expect_neq(hf_write_gguf("m.gguf", hf_small_shape(false), ND_GGUF_FP32, 1), ND_OK);
    cr_expect_eq(sync_count, 1);
    cr_assert_eq(entries_in(hf_dir.path), 0);
}

Test(hf_writer, a_large_model_is_sharded_with_an_index)
{
    nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
    o.max_file_bytes = 20000; /* the embedding alone has 24576 bytes: its own file */
    o.byte_tokenizer = false;
    sync_word = ".safetensors";
    const char *folder = hf_write_model("m", &o);
    assert_reads_back(folder, &o);
    hf_shell("cd %s && test -f model.safetensors.index.json && test ! -e model.safetensors",
             folder);
    hf_shell("cd %s && ls model-00001-of-0000?.safetensors >/dev/null", folder);
    int files = entries_in(folder) - 3; /* config, index, checksums */
    cr_assert_geq(files, 4);
    hf_shell("cd %s && grep -q '\"total_size\": %d$' *.index.json", folder,
             4 * (int)nd_shape_parameters(&o.shape));
    cr_expect_eq(sync_count, files + 1, "a loss of power may take a file, or the index");
    cr_expect_str_eq(synced, hf_dir.path, "or the folder's name");
    hf_shell("cd %s && test -f model-0000%d-of-0000%d.safetensors", folder, files, files);
    hf_expect_closed();
}

/* The bytes of a file are those of its tensors. */
Test(hf_writer, a_model_that_fills_a_file_exactly_is_not_cut)
{
    nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
    uint64_t head = 0;
    struct stat st;
    int fd = open(printed("%s/model.safetensors", hf_write_model("m", &o)), O_RDONLY | O_CLOEXEC);
    cr_assert(fstat(fd, &st) == 0 && read(fd, &head, sizeof head) == sizeof head);
    close(fd);
    o.max_file_bytes = st.st_size - (int64_t)(sizeof head + head);
    hf_shell("test -f %s/model.safetensors", hf_write_model("n", &o));
    o.max_file_bytes--;
    hf_shell("test -f %s/model-00002-of-00002.safetensors", hf_write_model("o", &o));
}

/* eos_token_id of the config.json that is written beside this tokenizer; NULL: beside none. */
static int64_t end_beside(const char *name, int64_t own, const char *tokenizer)
{
    nd_hf_reader *reader;
    nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
    o.byte_tokenizer = false;
    o.tokenizer = printed("%s/tokenizer.json", tokenizer ? hf_dir.path : "nowhere");
    if (tokenizer) {
        tempdir_write(&hf_dir, "tokenizer.json", tokenizer, strlen(tokenizer));
    }
    o.shape.eos_id = own;
    assert_ok(nd_hf_reader_open(hf_write_model(name, &o), &reader));
    int64_t id = nd_hf_reader_shape(reader)->eos_id;
    nd_hf_reader_close(reader);
    return id;
}

#define TOKENIZER(id)                                                                              \
    "{\"version\": \"1.0\", \"added_tokens\": [{\"id\": " id ", \"content\": \"<|endoftext|>\", "  \
    "\"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "        \
    "\"special\": true}], \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0, "                   \
    "\"<|endoftext|>\": " id "}, \"merges\": []}}"

/* Or what is generated by a new model would not end. */
Test(hf_writer, a_model_without_an_end_of_text_gets_that_of_its_tokenizer)
{
    cr_expect_eq(end_beside("none", -1, TOKENIZER("7")), 7);
    cr_expect_eq(end_beside("own", 3, TOKENIZER("7")), 3, "what the model names stays");
    cr_expect_eq(end_beside("large", -1, TOKENIZER("1000000")), -1, "the model has no such id");
    cr_expect_eq(end_beside("broken", -1, "{}"), -1, "the model is written all the same");
    cr_expect_eq(end_beside("gone", -1, NULL), -1, "the tokenizer is gone");
    cr_expect_eq(entries_in(printed("%s/gone", hf_dir.path)), 3); /* config, weights, checksums */
}

static const char chat_tokenizer[] =
    "{\"added_tokens\": [], \"model\": {\"type\": \"BPE\", \"merges\": [], "
    "\"vocab\": {\"a\": 0, \"<|im_start|>\": 1, \"<|im_end|>\": 2}}}";

/* Else a base model that was trained on messages would not stop behind its answer. */
Test(hf_writer, a_model_that_learned_turns_names_their_end)
{
    static const struct {
        const char *name, *given, *expected;
        nd_chat_choice chat;
    } cases[] = {
        {"base", "", "[0, 6, 2]", ND_CHOOSE_CHAT_CHATML}, /* without the file */
        {"one", "{\"eos_token_id\": 3, \"top_k\": 4}", "[3, 2]", ND_CHOOSE_CHAT_CHATML},
        {"several", "{\"eos_token_id\": [3, 2]}", "[3, 2]", ND_CHOOSE_CHAT_CHATML},
        {"null", "{\"eos_token_id\": null}", "[0, 6, 2]", ND_CHOOSE_CHAT_CHATML},
        {"text", "{\"eos_token_id\": 3}", "3", ND_CHOOSE_CHAT_NONE},
        {"other", "{\"eos_token_id\": 3}", "3", ND_CHOOSE_CHAT_LLAMA3},
        {"no_json", "{", "", ND_CHOOSE_CHAT_CHATML}, /* the file stays as it is */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
        const char *given = cases[i].given;
        uint64_t bytes;
        hf_shell("mkdir -p source");
        tempdir_write(&hf_dir, "source/tokenizer.json", chat_tokenizer, sizeof chat_tokenizer - 1);
        tempdir_write(&hf_dir, "source/generation_config.json", given, strlen(given));
        hf_shell("find source -empty -delete");
        o.byte_tokenizer = false;
        o.source = printed("%s/source", hf_dir.path);
        assert_ok(nd_hf_side_files_bytes(o.source, &bytes));
        cr_expect_eq(bytes, sizeof chat_tokenizer - 1 + strlen(given));
        o.chat = cases[i].chat;
        o.shape.eos_id = 0;
        o.shape.more_ends[0] = 6;
        o.shape.more_end_count = 1;
        const char *folder = hf_write_model(cases[i].name, &o);
        json_t *root = json_load_file(printed("%s/generation_config.json", folder), 0, NULL);
        char *text = json_dumps(json_object_get(root, "eos_token_id"), JSON_ENCODE_ANY);
        cr_assert_str_eq(text ? text : "", cases[i].expected, "%s: %s", cases[i].name, text);
        cr_expect(i != 1 || json_object_get(root, "top_k"), "other keys stay");
        free(text);
        json_decref(root);
    }
}

Test(hf_writer, writer_refuses_what_it_would_overwrite_or_cannot_make)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
    hf_list_tensors(&o.shape);
    const char *folder = tempdir_file(&hf_dir, "there");
    cr_assert_eq(mkdir(folder, 0777), 0);
    assert_fails(nd_hf_writer_open(folder, &o, &writer), ND_ERR_CANTCREATE,
                 "exists already and is not overwritten");
    assert_fails(nd_hf_writer_open("/proc/model", &o, &writer), ND_ERR_CANTCREATE, "\"/proc\"");
    assert_fails(nd_hf_writer_open("/nowhere/model", &o, &writer), ND_ERR_CANTCREATE,
                 "\"/nowhere\"");
    nd_hf_writer_options huge = o;
    huge.shape.vocab = (int64_t)1 << 52;
    folder = tempdir_file(&hf_dir, "huge");
    assert_fails(nd_hf_writer_open(folder, &huge, &writer), ND_ERR_CANTCREATE, "are free there");
    cr_assert_eq(entries_in(hf_dir.path), 1);

    /* A file-size limit stands in for a disk that fills up. */
    folder = tempdir_file(&hf_dir, "limited");
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){5000, 5000}), 0);
    assert_fails(nd_hf_writer_open(folder, &o, &writer), ND_ERR_CANTCREATE, "cannot reserve");
    cr_assert_eq(entries_in(hf_dir.path), 1, "the temporary folder is still there");
}

Test(hf_writer, a_commit_with_a_gap_fails_and_leaves_nothing)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_BF16);
    hf_list_tensors(&o.shape);
    assert_ok(nd_hf_writer_open(tempdir_file(&hf_dir, "m/"), &o, &writer));
    cr_assert_eq(entries_in(hf_dir.path), 1);
    for (int i = 0; i < hf_tensor_count; i++) {
        int64_t n = hf_count_of(&hf_tensors[i]);
        assert_ok(hf_write_piece(writer, i, 0, n / 2));
        assert_ok(hf_write_piece(writer, i, n / 2 + (i == 5), n));
    }
    assert_fails(nd_hf_writer_commit(writer), ND_ERR_INTERNAL, "were never written");
    nd_hf_writer_abort(NULL);
    hf_expect_closed();
    cr_assert_eq(entries_in(hf_dir.path), 0);
}

/* The weights are kept, and the caller is told: this file is shorter than its size says. */
Test(hf_writer, a_model_whose_tokenizer_cannot_be_read_is_written_with_an_error)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_BF16);
    struct stat st;
    o.byte_tokenizer = false;
    o.tokenizer = "/sys/devices/system/cpu/possible";
    if (stat(o.tokenizer, &st) != 0 || st.st_size < 4096) {
        hf_teardown();
        skip_test("/sys has no file that is shorter than its size");
    }
    const char *folder = hf_begin_model("m", &o, &writer);
    assert_fails(nd_hf_writer_commit(writer), ND_ERR_IO, "/sys/devices/system/cpu/possible");
    assert_reads_back(folder, &o);
}

Test(hf_writer, a_folder_that_appears_meanwhile_is_not_replaced)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = hf_options_of(true, ND_DTYPE_BF16);
    const char *folder = hf_begin_model("m", &o, &writer);
    cr_assert_eq(mkdir(folder, 0777), 0);
    assert_fails(nd_hf_writer_commit(writer), ND_ERR_CANTCREATE, "cannot rename");
    cr_assert_eq(entries_in(folder), 0);
    cr_assert_eq(entries_in(hf_dir.path), 1);
}
