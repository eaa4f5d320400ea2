// SPDX-License-Identifier: Apache-2.0
/* Damaged folders, and types that are converted. */
#include <math.h>
#include <string.h>

#include "tests/unit/trainer/weights/hf_model.h"
#include "trainer/weights/safetensors.h"

TestSuite(hf_reader, .init = hf_setup, .fini = hf_teardown);

static char folder[128], weights[160]; /* of the model of a test, and its model.safetensors */

static void write_model(nd_hf_writer_options options)
{
    snprintf(folder, sizeof folder, "%s", hf_write_model("m", &options));
    snprintf(weights, sizeof weights, "%s/model.safetensors", folder);
}

/* Those of the model, to be changed and written. */
static nd_safetensors_tensor list[HF_TENSORS_MAX];
static int64_t count;

/* Replaces model.safetensors by these tensors, all zero. */
static void write_weights(void)
{
    char *head;
    size_t bytes;
    assert_ok(nd_safetensors_layout(list, count, &head, &bytes));
    FILE *f = fopen(weights, "wb");
    fwrite(head, 1, bytes, f);
    cr_assert_eq(fclose(f), 0);
    cr_assert_eq(truncate(weights, (off_t)list[count - 1].end), 0);
    free(head);
}

static void list_all(void)
{
    for (int i = 0; i < hf_tensor_count; i++) {
        list[i] =
            (nd_safetensors_tensor){.name = hf_tensors[i].name,
                                    .dtype = ND_SAFETENSORS_F32,
                                    .axes = hf_tensors[i].axes,
                                    .shape = {hf_tensors[i].shape[0], hf_tensors[i].shape[1]}};
    }
    count = hf_tensor_count;
}

static void add_tensor(const char *name, nd_safetensors_dtype dtype, int axes, int64_t rows,
                       int64_t columns)
{
    list[count++] = (nd_safetensors_tensor){
        .name = (char *)name, .dtype = dtype, .axes = axes, .shape = {rows, columns}};
}

static nd_safetensors_tensor *named(const char *name)
{
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(list[i].name, name) == 0) {
            return &list[i];
        }
    }
    cr_assert_fail("no %s", name);
    return NULL;
}

static nd_status open_and_check(void)
{
    nd_hf_reader *reader;
    ND_TRY(nd_hf_reader_open(folder, &reader));
    nd_status status = nd_hf_reader_check(reader);
    nd_hf_reader_close(reader);
    return status;
}

/* The folder is refused. */
static void check_fails(const char *words)
{
    assert_fails(open_and_check(), ND_ERR_DATA, words);
}

/* The list in place of the model's weights is refused. */
static void list_fails(const char *words)
{
    write_weights();
    check_fails(words);
}

Test(hf_reader, reader_names_what_is_missing_extra_or_different)
{
    write_model(hf_options_of(true, ND_DTYPE_F32));
    assert_ok(open_and_check());

    list_all();
    *named("model.norm.weight") = list[count - 1];
    count--;
    list_fails("lacks tensor \"model.norm.weight\"");

    list_all();
    add_tensor("model.layers.2.mlp.up_proj.weight", ND_SAFETENSORS_F32, 0, 0, 0);
    list_fails("holds tensor \"model.layers.2.mlp.up_proj.weight\", which a model of 2 layers");

    static const struct {
        const char *name, *words;
        int axes;
        int64_t shape[2];
    } bad[] = {
        {"model.layers.1.mlp.up_proj.weight", "has 2 axes of 41 x 24, but", 2, {41, 24}},
        {"model.layers.1.mlp.up_proj.weight", "config.json asks for 40 x 24", 2, {40, 23}},
        {"model.norm.weight", "has 0 axes of 1 x 1, but config.json asks for 24 x 1", 0, {24, 1}},
        {"model.norm.weight", "has 2 axes of 24 x 1, but config.json asks", 2, {24, 1}},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        list_all();
        nd_safetensors_tensor *t = named(bad[i].name);
        t->axes = bad[i].axes;
        memcpy(t->shape, bad[i].shape, sizeof bad[i].shape);
        list_fails(bad[i].words);
    }

    list_all();
    named("model.norm.weight")->dtype = ND_SAFETENSORS_F64;
    list_fails("is F64; only F32, BF16 and F16 are read");

    /* Allowed: rotary buffers of old files, and a head beside tied embeddings that equals them, in
     * one piece of the comparison and in two. */
    static const int64_t vocabs[] = {256, 10923};
    for (int i = 1; i >= 0; i--) {
        const int64_t vocab = vocabs[i];
        hf_shell("sed -i 's/\"vocab_size\": [0-9]*/\"vocab_size\": %lld/' %s/config.json",
                 (long long)vocab, folder);
        list_all();
        named("model.embed_tokens.weight")->shape[0] = vocab;
        add_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", ND_SAFETENSORS_F32, 1, 3, 0);
        add_tensor("lm_head.weight", ND_SAFETENSORS_F32, 2, vocab, 24);
        write_weights();
        assert_ok(open_and_check());
        hf_shell("cd %s && printf '\\077' | dd of=model.safetensors bs=1 conv=notrunc seek=%llu "
                 "2>/dev/null",
                 folder, (unsigned long long)named("lm_head.weight")->end - 1);
        check_fails("lm_head.weight and model.embed_tokens.weight differ; write false");
    }
    list_all();
    add_tensor("lm_head.weight", ND_SAFETENSORS_F32, 2, 255, 24);
    list_fails("\"lm_head.weight\" has 2 axes of 255");
}

Test(hf_reader, only_bf16_alone_is_bf16)
{
    nd_hf_reader *reader;
    write_model(hf_options_of(true, ND_DTYPE_BF16));
    for (int other = 0; other <= hf_tensor_count; other++) { /* in the end no tensor differs */
        list_all();
        for (int64_t i = 0; i < count; i++) {
            list[i].dtype = i == other ? ND_SAFETENSORS_F16 : ND_SAFETENSORS_BF16;
        }
        write_weights();
        assert_ok(nd_hf_reader_open(folder, &reader));
        cr_expect_eq(nd_hf_reader_is_bf16(reader), other == hf_tensor_count, "tensor %d", other);
        nd_hf_reader_close(reader);
    }
}

Test(hf_reader, reader_errors_of_single_files)
{
    write_model(hf_options_of(false, ND_DTYPE_BF16));
    hf_shell("cd %s && truncate -s -1 model.safetensors", folder);
    check_fails("it is truncated");
    hf_shell("cd %s && truncate -s 0 model.safetensors", folder);
    check_fails("too short for a safetensors file");
    hf_shell("cd %s && rm model.safetensors && touch pytorch_model.bin", folder);
    check_fails("holds neither model.safetensors nor");
    hf_shell("cd %s && rm config.json", folder);
    check_fails("has no config.json");
    cr_expect_null(strstr(nd_error_last()->message, "the folder of a run"));
    hf_shell("cd %s && touch manifest.json", folder);
    check_fails("has no config.json; go on from a checkpoint with --resume-from-checkpoint, or "
                "make a model of it with ndtrain export");
    hf_shell("cd %s && mkdir model && touch model/config.json", folder);
    check_fails(
        "has no config.json; it is the folder of a run, whose model is in its folder model");
}

Test(hf_reader, reader_errors_of_sharded_sets)
{
    nd_hf_writer_options o = hf_options_of(false, ND_DTYPE_F32);
    o.max_file_bytes = 40000;
    o.byte_tokenizer = false;
    write_model(o);
    assert_ok(open_and_check());
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
        hf_shell("cd %s && cp %s keep && sed -i '%s' %s && ! cmp -s %s keep", folder, index,
                 bad[i].edit, index, index);
        check_fails(bad[i].words);
        hf_shell("cd %s && mv keep %s", folder, index);
    }
    hf_shell("cd %s && cp %s keep && sed -i 's/\"total_size\": /&1/' %s", folder, index, index);
    assert_ok(open_and_check()); /* a warning only */
    hf_shell("cd %s && mv keep %s", folder, index);

    /* The embedding in a second shard as well. */
    hf_shell("cd %s && cp model-00001-of-0000?.safetensors extra.safetensors"
             " && sed -i 's/\"model.norm.weight\": \"[^\"]*\"/\"model.norm.weight\": "
             "\"extra.safetensors\"/' %s",
             folder, index);
    check_fails("is in two files");
    hf_expect_closed();
}

/* Every binary16 code, against the formula (-1)^s 2^(e-15) (1 + m/1024), computed by ldexp. */
Test(hf_reader, f16_is_widened_exactly)
{
    static float values[65536];
    write_model(hf_options_of(true, ND_DTYPE_F32));
    list_all();
    add_tensor("x", ND_SAFETENSORS_F16, 1, 65536, 0);
    write_weights();
    FILE *f = fopen(weights, "r+b");
    fseek(f, (long)named("x")->begin, SEEK_SET);
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
