// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/ckpt/hf_folder.h"
#include "trainer/ckpt/safetensors.h"
#include "trainer/model/params.h"

enum { TENSORS_MAX = 64 };

static tempdir dir;
static nd_hf_tensor tensors[TENSORS_MAX];
static int tensor_count;

static void setup(void)
{
    tempdir_make(&dir);
}

static void shell(const char *format, ...)
{
    char command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    cr_assert_eq(system(command), 0, "%s", command);
}

static void teardown(void)
{
    shell("rm -rf %s", dir.path);
}

TestSuite(hf_folder, .init = setup, .fini = teardown);

/* Two layers, GQA, llama3 RoPE; no two extents are equal. */
static nd_llama_shape small_shape(bool tied)
{
    return (nd_llama_shape){.vocab = 256,
                            .hidden = 24,
                            .ffn = 40,
                            .layers = 2,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 6,
                            .max_positions = 512,
                            .rms_eps = 1e-5,
                            .init_std = 0.02,
                            .tied = tied,
                            .rope = {.type = ND_ROPE_LLAMA3,
                                     .theta = 500000,
                                     .factor = 8,
                                     .low_freq_factor = 1,
                                     .high_freq_factor = 4,
                                     .original_max_positions = 64},
                            .bos_id = -1,
                            .eos_id = -1};
}

static void list_tensors(const nd_llama_shape *shape)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_layout *layout;
    assert_ok(nd_layout_create(shape, &one, (nd_coord){0}, NULL, NULL, &layout));
    tensor_count = layout->param_count;
    cr_assert_leq(tensor_count, TENSORS_MAX);
    for (int i = 0; i < tensor_count; i++) {
        const nd_param *p = &layout->params[i];
        tensors[i] = (nd_hf_tensor){.axes = p->axes, .shape = {p->rows, p->cols}};
        snprintf(tensors[i].name, sizeof tensors[i].name, "%s", p->name);
    }
    nd_layout_destroy(layout);
}

static int64_t count_of(const nd_hf_tensor *t)
{
    return t->shape[0] * (t->axes == 2 ? t->shape[1] : 1);
}

static float value_of(int tensor, int64_t element)
{
    return nd_rng_normal(9, (uint64_t)tensor, (uint64_t)element);
}

static nd_hf_writer_options options_of(bool tied, nd_dtype dtype)
{
    return (nd_hf_writer_options){
        .shape = small_shape(tied), .dtype = dtype, .byte_tokenizer = true};
}

/* Elements [begin, end) of tensor i. */
static nd_status write_piece(nd_hf_writer *writer, int i, int64_t begin, int64_t end)
{
    static float values[65536];
    for (int64_t e = begin; e < end; e++) {
        values[e - begin] = value_of(i, e);
    }
    return nd_hf_writer_write(writer, tensors[i].name, begin, end - begin, values);
}

static const char *write_model(const char *name, const nd_hf_writer_options *options)
{
    nd_hf_writer *writer;
    const char *folder = tempdir_file(&dir, name);
    list_tensors(&options->shape);
    assert_ok(nd_hf_writer_open(folder, options, tensors, tensor_count, &writer));
    for (int i = tensor_count - 1; i >= 0;
         i--) { /* backwards, and each in three pieces, last first */
        int64_t n = count_of(&tensors[i]);
        assert_ok(write_piece(writer, i, n / 2, n));
        assert_ok(write_piece(writer, i, n / 3, n / 2));
        assert_ok(write_piece(writer, i, 0, n / 3));
    }
    assert_ok(nd_hf_writer_commit(writer));
    return folder;
}

static int entries_in(const char *folder)
{
    char command[512];
    int n = -1;
    snprintf(command, sizeof command, "ls -A %s | wc -l", folder);
    FILE *f = popen(command, "r");
    cr_assert_eq(fscanf(f, "%d", &n), 1);
    pclose(f);
    return n;
}

static void assert_reads_back(const char *folder, const nd_hf_writer_options *options)
{
    static float values[65536];
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_check(reader));
    const nd_llama_shape *shape = nd_hf_reader_shape(reader);
    cr_assert_eq(shape->ffn, options->shape.ffn);
    cr_assert_eq(shape->tied, options->shape.tied);
    cr_assert_eq(shape->rope.type, ND_ROPE_LLAMA3);
    cr_assert_eq(nd_hf_reader_has(reader, "lm_head.weight"), !shape->tied);
    for (int i = 0; i < tensor_count; i++) {
        int64_t n = count_of(&tensors[i]);
        const int64_t slices[][2] = {{0, n}, {n / 4, n - n / 3}, {n - 1, n}, {n, n}};
        for (int s = 0; s < 4; s++) {
            int64_t begin = slices[s][0], count = slices[s][1] - begin;
            assert_ok(nd_hf_reader_read(reader, tensors[i].name, begin, count, values));
            for (int64_t e = 0; e < count; e++) {
                float expected = value_of(i, begin + e);
                if (options->dtype == ND_DTYPE_BF16) {
                    expected = nd_bf16_to_f32(nd_bf16_from_f32(expected));
                }
                cr_assert_eq(values[e], expected, "%s[%ld]", tensors[i].name, (long)(begin + e));
            }
        }
    }
    nd_hf_reader_close(reader);
}

Test(hf_folder, what_is_written_reads_back)
{
    const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
    for (int k = 0; k < 4; k++) {
        char name[8];
        snprintf(name, sizeof name, "m%d", k);
        nd_hf_writer_options o = options_of(k & 1, dtypes[k >> 1]);
        const char *folder = write_model(name, &o);
        assert_reads_back(folder, &o);
        cr_assert_eq(entries_in(folder), 4); /* config, weights, tokenizer, its config */
        cr_assert_eq(entries_in(dir.path), k + 1, "a temporary folder is left");
    }
}

/* More elements in one call than are converted at a time. */
Test(hf_folder, one_long_piece)
{
    enum { ROWS = 3, COLS = 50001, N = ROWS * COLS };
    static float values[N], back[N];
    nd_hf_writer *writer;
    nd_hf_reader *reader;
    nd_hf_writer_options o = options_of(true, ND_DTYPE_BF16);
    const nd_hf_tensor one = {.name = "x", .axes = 2, .shape = {ROWS, COLS}};
    for (int i = 0; i < N; i++) {
        values[i] = nd_bf16_to_f32(nd_bf16_from_f32(value_of(0, i)));
    }
    const char *folder = tempdir_file(&dir, "m");
    assert_ok(nd_hf_writer_open(folder, &o, &one, 1, &writer));
    assert_ok(nd_hf_writer_write(writer, "x", 0, N, values));
    assert_ok(nd_hf_writer_commit(writer));
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_read(reader, "x", 0, N, back));
    cr_assert_eq(memcmp(values, back, sizeof back), 0);
    nd_hf_reader_close(reader);
}

Test(hf_folder, a_large_model_is_sharded_with_an_index)
{
    nd_hf_writer_options o = options_of(false, ND_DTYPE_F32);
    o.max_file_bytes = 20000; /* the embedding alone has 24576 bytes: its own file */
    o.byte_tokenizer = false;
    const char *folder = write_model("m", &o);
    assert_reads_back(folder, &o);
    shell("cd %s && test -f model.safetensors.index.json && test ! -e model.safetensors", folder);
    shell("cd %s && ls model-00001-of-0000?.safetensors >/dev/null", folder);
    int files = entries_in(folder) - 2;
    cr_assert_geq(files, 4);
    shell("cd %s && test -f model-0000%d-of-0000%d.safetensors", folder, files, files);
}

Test(hf_folder, writer_refuses_what_it_would_overwrite_or_cannot_make)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = options_of(false, ND_DTYPE_F32);
    list_tensors(&o.shape);
    const char *folder = tempdir_file(&dir, "there");
    cr_assert_eq(mkdir(folder, 0777), 0);
    assert_fails(nd_hf_writer_open(folder, &o, tensors, tensor_count, &writer), ND_ERR_CANTCREATE,
                 "exists already and is not overwritten");
    assert_fails(nd_hf_writer_open("/proc/model", &o, tensors, tensor_count, &writer),
                 ND_ERR_CANTCREATE, "\"/proc\"");
    assert_fails(nd_hf_writer_open("/nowhere/model", &o, tensors, tensor_count, &writer),
                 ND_ERR_CANTCREATE, "\"/nowhere\"");
    nd_hf_tensor huge = {.name = "huge", .axes = 2, .shape = {1 << 30, 1 << 28}};
    folder = tempdir_file(&dir, "huge");
    assert_fails(nd_hf_writer_open(folder, &o, &huge, 1, &writer), ND_ERR_CANTCREATE,
                 "are free there");
    cr_assert_eq(entries_in(dir.path), 1);

    folder =
        tempdir_file(&dir, "limited"); /* a file-size limit stands in for a disk that fills up */
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &(struct rlimit){5000, 5000}), 0);
    assert_fails(nd_hf_writer_open(folder, &o, tensors, tensor_count, &writer), ND_ERR_CANTCREATE,
                 "cannot reserve");
    cr_assert_eq(entries_in(dir.path), 1, "the temporary folder is still there");
}

Test(hf_folder, a_commit_with_a_gap_fails_and_leaves_nothing)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = options_of(true, ND_DTYPE_BF16);
    list_tensors(&o.shape);
    const char *folder = tempdir_file(&dir, "m");
    assert_ok(nd_hf_writer_open(folder, &o, tensors, tensor_count, &writer));
    for (int i = 0; i < tensor_count; i++) {
        int64_t n = count_of(&tensors[i]);
        int64_t gap = i == 5 ? n - 7 : n;
        assert_ok(write_piece(writer, i, 0, gap));
        assert_ok(write_piece(writer, i, i == 5 ? n - 6 : n / 2, n));
    }
    assert_fails(nd_hf_writer_commit(writer), ND_ERR_INTERNAL, "was never written");
    cr_assert_eq(entries_in(dir.path), 0);
}

Test(hf_folder, a_folder_that_appears_meanwhile_is_not_replaced)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = options_of(true, ND_DTYPE_BF16);
    list_tensors(&o.shape);
    const char *folder = tempdir_file(&dir, "m");
    assert_ok(nd_hf_writer_open(folder, &o, tensors, tensor_count, &writer));
    for (int i = 0; i < tensor_count; i++) {
        assert_ok(write_piece(writer, i, 0, count_of(&tensors[i])));
    }
    cr_assert_eq(mkdir(folder, 0777), 0);
    assert_fails(nd_hf_writer_commit(writer), ND_ERR_CANTCREATE, "cannot rename");
    cr_assert_eq(entries_in(folder), 0);
    cr_assert_eq(entries_in(dir.path), 1);
}

Test(hf_folder, abort_removes_the_temporary_folder)
{
    nd_hf_writer *writer;
    nd_hf_writer_options o = options_of(true, ND_DTYPE_BF16);
    list_tensors(&o.shape);
    assert_ok(nd_hf_writer_open(tempdir_file(&dir, "m/"), &o, tensors, tensor_count, &writer));
    cr_assert_eq(entries_in(dir.path), 1);
    nd_hf_writer_abort(writer);
    cr_assert_eq(entries_in(dir.path), 0);
    nd_hf_writer_abort(NULL);
}

/* Damaged folders. */

static nd_status open_and_check(const char *folder)
{
    nd_hf_reader *reader;
    ND_TRY(nd_hf_reader_open(folder, &reader));
    nd_status status = nd_hf_reader_check(reader);
    nd_hf_reader_close(reader);
    return status;
}

/* Replaces model.safetensors by these tensors, all zero. */
static void write_weights(const char *folder, const char *file, nd_st_tensor *list, int64_t count)
{
    char path[256], *head;
    size_t bytes;
    assert_ok(nd_st_layout(list, count, &head, &bytes));
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *f = fopen(path, "wb");
    fwrite(head, 1, bytes, f);
    cr_assert_eq(fclose(f), 0);
    cr_assert_eq(truncate(path, (off_t)list[count - 1].end), 0);
    free(head);
}

/* The tensors of the model as a list for write_weights. */
static int64_t all_tensors(nd_st_tensor *list)
{
    for (int i = 0; i < tensor_count; i++) {
        list[i] = (nd_st_tensor){.name = tensors[i].name,
                                 .dtype = ND_ST_F32,
                                 .axes = tensors[i].axes,
                                 .shape = {tensors[i].shape[0], tensors[i].shape[1]}};
    }
    return tensor_count;
}

static nd_st_tensor *named(nd_st_tensor *list, int64_t count, const char *name)
{
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(list[i].name, name) == 0) {
            return &list[i];
        }
    }
    cr_assert_fail("no %s", name);
    return NULL;
}

Test(hf_folder, reader_names_what_is_missing_extra_or_different)
{
    nd_st_tensor list[TENSORS_MAX];
    nd_hf_writer_options o = options_of(true, ND_DTYPE_F32);
    char folder[128];
    snprintf(folder, sizeof folder, "%s", write_model("m", &o));
    assert_ok(open_and_check(folder));

    int64_t n = all_tensors(list);
    *named(list, n, "model.norm.weight") = list[n - 1];
    write_weights(folder, "model.safetensors", list, n - 1);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "lacks tensor \"model.norm.weight\"");

    n = all_tensors(list);
    list[n++] = (nd_st_tensor){.name = "model.layers.2.mlp.up_proj.weight", .dtype = ND_ST_F32};
    write_weights(folder, "model.safetensors", list, n);
    assert_fails(open_and_check(folder), ND_ERR_DATA,
                 "holds tensor \"model.layers.2.mlp.up_proj.weight\", which a Llama of 2 layers");

    n = all_tensors(list);
    named(list, n, "model.layers.1.mlp.up_proj.weight")->shape[0] = 41;
    write_weights(folder, "model.safetensors", list, n);
    assert_fails(open_and_check(folder), ND_ERR_DATA,
                 "has 2 axes of 41 x 24, but config.json asks for 40 x 24");

    n = all_tensors(list);
    named(list, n, "model.norm.weight")->axes = 0;
    write_weights(folder, "model.safetensors", list, n);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "asks for 24 x 1");

    n = all_tensors(list);
    named(list, n, "model.norm.weight")->dtype = ND_ST_F64;
    write_weights(folder, "model.safetensors", list, n);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "is F64; F32, BF16 and F16 are read");

    /* Allowed: rotary buffers of old files, and a head beside tied embeddings. */
    n = all_tensors(list);
    list[n++] = (nd_st_tensor){.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                               .dtype = ND_ST_F32,
                               .axes = 1,
                               .shape = {3}};
    list[n++] =
        (nd_st_tensor){.name = "lm_head.weight", .dtype = ND_ST_F32, .axes = 2, .shape = {256, 24}};
    write_weights(folder, "model.safetensors", list, n);
    assert_ok(open_and_check(folder));
    n = all_tensors(list);
    list[n++] =
        (nd_st_tensor){.name = "lm_head.weight", .dtype = ND_ST_F32, .axes = 2, .shape = {255, 24}};
    write_weights(folder, "model.safetensors", list, n);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "\"lm_head.weight\" has 2 axes of 255");
}

Test(hf_folder, reader_errors_of_single_files)
{
    nd_hf_writer_options o = options_of(false, ND_DTYPE_BF16);
    char folder[128];
    snprintf(folder, sizeof folder, "%s", write_model("m", &o));
    shell("cd %s && truncate -s -1 model.safetensors", folder);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "it is truncated");
    shell("cd %s && truncate -s 0 model.safetensors", folder);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "too short for a safetensors file");
    shell("cd %s && rm model.safetensors && touch pytorch_model.bin", folder);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "holds neither model.safetensors nor");
    shell("cd %s && rm config.json", folder);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "has no config.json");
}

Test(hf_folder, reader_errors_of_sharded_sets)
{
    nd_hf_writer_options o = options_of(false, ND_DTYPE_F32);
    o.max_file_bytes = 40000;
    o.byte_tokenizer = false;
    char folder[128];
    snprintf(folder, sizeof folder, "%s", write_model("m", &o));
    assert_ok(open_and_check(folder));
    const char *index = "model.safetensors.index.json";
    static const struct {
        const char *edit, *words;
    } bad[] = {
        {"s/model-00001-of/..\\/model-00001-of/", "must be the name of a file in the same folder"},
        {"s/\"model-00001-of[^\"]*\"/\"..\"/", "must be the name of a file in the same folder"},
        {"s/\"model-00001-of[^\"]*\"/7/", "is not a string"},
        {"s/model-00001-of-0000/model-00001-of-0009/", "cannot open"},
        {"/\"lm_head.weight\"/d", "lacks tensor \"lm_head.weight\""}, /* with its own file */
        {"/\"model.layers.0.input_layernorm.weight\"/d", "is not in"},
        {"s/\"model.norm.weight\"/\"model.norm.bias\"/", "but it is in none"},
        {"/\"model.norm.weight\"/s/0000[0-9]-of/00001-of/", "not of one model"},
        {"s/weight_map/weights/", "has no \"weight_map\""},
        {"s/{/[/", "line "},
        {"s/\"model.norm.weight\"/\"lm_head.weight\"/", "duplicate object key"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        shell("cd %s && cp %s keep && sed -i '%s' %s && ! cmp -s %s keep", folder, index,
              bad[i].edit, index, index);
        assert_fails(open_and_check(folder), ND_ERR_DATA, bad[i].words);
        shell("cd %s && mv keep %s", folder, index);
    }
    shell("cd %s && cp %s keep && sed -i 's/\"total_size\": /&1/' %s", folder, index, index);
    assert_ok(open_and_check(folder)); /* a warning only */
    shell("cd %s && mv keep %s", folder, index);

    /* The embedding in a second shard as well. */
    shell("cd %s && cp model-00001-of-0000?.safetensors extra.safetensors"
          " && sed -i 's/\"model.norm.weight\": \"[^\"]*\"/\"model.norm.weight\": "
          "\"extra.safetensors\"/' %s",
          folder, index);
    assert_fails(open_and_check(folder), ND_ERR_DATA, "is in two files");
}

/* Every binary16 code, against the formula (-1)^s 2^(e-15) (1 + m/1024), computed by ldexp. */
Test(hf_folder, f16_is_widened_exactly)
{
    static nd_st_tensor list[TENSORS_MAX];
    static float values[65536];
    nd_hf_writer_options o = options_of(true, ND_DTYPE_F32);
    char folder[128], path[160];
    snprintf(folder, sizeof folder, "%s", write_model("m", &o));
    int64_t n = all_tensors(list);
    list[n++] = (nd_st_tensor){.name = "x", .dtype = ND_ST_F16, .axes = 1, .shape = {65536}};
    write_weights(folder, "model.safetensors", list, n);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *f = fopen(path, "r+b");
    fseek(f, (long)named(list, n, "x")->begin, SEEK_SET);
    for (uint32_t code = 0; code < 65536; code++) {
        fwrite(&code, 2, 1, f);
    }
    cr_assert_eq(fclose(f), 0);
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(folder, &reader));
    assert_ok(nd_hf_reader_read(reader, "x", 0, 65536, values));
    for (int code = 0; code < 65536; code++) {
        int exponent = code >> 10 & 31, mantissa = code & 1023;
        double magnitude = exponent == 0    ? ldexp(mantissa, -24)
                           : exponent == 31 ? INFINITY
                                            : ldexp(1024 + mantissa, exponent - 25);
        if (exponent == 31 && mantissa != 0) {
            cr_assert(isnan(values[code]));
        } else {
            cr_assert_eq(values[code], (float)(code & 0x8000 ? -magnitude : magnitude));
            cr_assert_eq(signbit(values[code]) != 0, code >> 15);
        }
    }
    nd_hf_reader_close(reader);
}
