// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/hash.h"
#include "tests/unit/trainer/weights/hf_model.h"
#include "tests/unit/trainer/weights/hf_shape.h"

static void begin(void)
{
    hf_setup();
    setenv("XDG_CACHE_HOME", hf_dir.path, 1);
}

TestSuite(gguf, .init = begin, .fini = hf_teardown);

/* The digests are those of the values that the Python package gguf makes of these bytes. */
Test(gguf, blocks_stand_for_the_values_of_the_package)
{
    static const struct {
        int type;
        const char *digest; /* the first digits of that of the values */
    } cases[] = {{0, "5618b9e4f156a78d"},  {1, "6ba747d25dab8bd2"}, {30, "04fb4866a8f3966f"},
                 {8, "be1dd98ccbbe7286"},  {2, "6c259ceaa94eb741"}, {3, "0cb68bc9e28ef404"},
                 {12, "9ff26438d096dbe0"}, {14, "11c9618b938fc8d2"}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const nd_gguf_type *type = &nd_gguf_types[cases[c].type];
        uint8_t block[256];
        float values[ND_GGUF_BLOCK_MAX];
        char hex[65];
        for (int i = 0; i < type->bytes; i++) {
            block[i] = (uint8_t)((i * 73 + 11) % 251);
            block[i] &= i == 1 || i == 3 || i == 209 ? 0xbf : 0xff;
        }
        type->load(block, values);
        assert_ok(nd_sha256((const char *)values, (size_t)type->block * sizeof *values, hex));
        cr_expect(strncmp(hex, cases[c].digest, 16) == 0, "%d: %s", cases[c].type, hex);
    }
}

static const char *write_file(const char *name, int type, int64_t hidden)
{
    nd_shape shape = hf_small_shape(hidden % 2 == 1); /* a tied one ends with a norm */
    shape.hidden = hidden;
    assert_ok(hf_write_gguf(name, shape, type, 1));
    return tempdir_file(&hf_dir, name);
}

/* Returns what the head of a file says. */
static nd_shape shape_of(const char *path)
{
    nd_safetensors_list list;
    nd_shape shape;
    assert_ok(nd_gguf_open(path, &list, &shape, NULL));
    nd_safetensors_list_fini(&list);
    return shape;
}

Test(gguf, a_file_that_was_written_reads_back)
{
    static float values[65536];
    const nd_shape shape = hf_small_shape(false);
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(write_file("model.gguf", ND_GGUF_FP32, 24), &reader));
    assert_ok(nd_hf_reader_check(reader));
    cr_expect_not(nd_hf_reader_is_bf16(reader));
    const nd_shape *read = nd_hf_reader_shape(reader);
    cr_expect_eq(read->rope.type, ND_ROPE_LLAMA3);
    cr_expect(read->rope.factor == shape.rope.factor && read->rms_eps == shape.rms_eps);
    for (int64_t i = 0; i < 3; i++) { /* so few pairs have the same factors with other lengths */
        cr_expect(nd_gguf_factor(&read->rope, 6, i) == nd_gguf_factor(&shape.rope, 6, i));
    }
    for (int i = 0; i < hf_tensor_count; i++) { /* in two pieces that cut rows */
        const int64_t all = hf_count_of(&hf_tensors[i]), cut = all / 3;
        assert_ok(nd_hf_reader_read(reader, hf_tensors[i].name, 0, cut, values));
        assert_ok(nd_hf_reader_read(reader, hf_tensors[i].name, cut, all - cut, values + cut));
        for (int64_t e = 0; e < all; e++) {
            cr_assert(values[e] == hf_value_of(i, e), "%s %lld", hf_tensors[i].name, (long long)e);
        }
    }
    nd_hf_reader_close(reader);
}

/* Rows of 64 are two blocks each. */
Test(gguf, pieces_may_begin_and_end_within_blocks)
{
    static float whole[65536], piece[65536];
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(write_file("model.gguf", ND_GGUF_Q8_0, 64), &reader));
    for (int i = 0; i < hf_tensor_count; i++) {
        const int64_t all = hf_count_of(&hf_tensors[i]), cuts[] = {0, 5, 11, 70, all};
        assert_ok(nd_hf_reader_read(reader, hf_tensors[i].name, 0, all, whole));
        for (int c = 0; c < 4 && cuts[c] < all; c++) {
            const int64_t count = nd_min(cuts[c + 1], all) - cuts[c];
            assert_ok(nd_hf_reader_read(reader, hf_tensors[i].name, cuts[c], count, piece));
            cr_expect_arr_eq(piece, whole + cuts[c], (size_t)count * sizeof *piece, "%s, %d",
                             hf_tensors[i].name, c);
        }
    }
    nd_hf_reader_close(reader);
}

/* A file has only the factors of the pairs; of so many pairs they follow from one length. */
Test(gguf, rope_has_the_length_that_its_factors_follow_from)
{
    static const int64_t lengths[] = {64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    nd_shape shape = hf_small_shape(false);
    shape.head_dim = 128;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        shape.rope.original_max_positions = lengths[i];
        assert_ok(hf_write_gguf("model.gguf", shape, ND_GGUF_BF16, 1));
        const nd_shape read = shape_of(tempdir_file(&hf_dir, "model.gguf"));
        cr_expect_eq(read.rope.original_max_positions, lengths[i], "%lld",
                     (long long)read.rope.original_max_positions);
        hf_shell("rm model.gguf");
    }
    hf_expect_closed();
}

/* Nothing is left of the file. */
Test(gguf, models_that_no_file_can_hold_are_refused)
{
    static const struct {
        nd_family family;
        nd_rope_type rope;
        int64_t window, o_bias;
        const char *words;
    } cases[] = {{ND_FAMILY_MISTRAL, 0, 0, 0, "only llama, qwen2 and"},
                 {0, 0, 7, 0, "has a sliding window"},
                 {0, ND_ROPE_DYNAMIC, 0, 0, "or the rope_type"},
                 {0, ND_ROPE_YARN, 0, 0, "or the rope_type"},
                 {0, ND_ROPE_LONGROPE, 0, 0, "or the rope_type"},
                 {ND_FAMILY_QWEN3, 0, 0, 1, "llama.cpp does not load it"},
                 {ND_FAMILY_QWEN2, ND_ROPE_LLAMA3, 0, 0, "no rope_type llama3"},
                 {0, 0, 0, 0, "F16 cannot hold"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_shape s = hf_small_shape(false);
        s.family = cases[i].family;
        s.rope.type = cases[i].rope;
        s.window = cases[i].window;
        s.o_bias = cases[i].o_bias;
        assert_fails(hf_write_gguf("no", s, ND_GGUF_FP16, 1e5f), ND_ERR_DATA, cases[i].words);
    }
    hf_shell("test -z \"$(ls -A %s)\"", hf_dir.path);
}

/* Each code of F16 comes back, the middle between two goes to the even one, and what is next to it
 * to the nearer one. Behind the largest code comes that of infinity, which is refused. */
Test(gguf, values_are_rounded_to_the_nearest_of_f16)
{
    const nd_gguf_type *type = &nd_gguf_types[ND_GGUF_FP16];
    for (int32_t i = 0; i < 2 * 0x7c00; i++) {
        const uint16_t code = (uint16_t)(i % 2 << 15 | i / 2), next = code + 1;
        uint16_t stored[4];
        float at[4], middle;
        bool held = true;
        type->load((const uint8_t *)&code, &at[0]);
        type->load((const uint8_t *)&next, &middle);
        middle = isinf(middle) ? copysignf(65536, at[0]) : middle;
        middle = at[0] + (middle - at[0]) / 2;
        at[1] = nextafterf(middle, at[0]), at[2] = middle;
        at[3] = nextafterf(middle, 2 * middle);
        for (int k = 0; k < 4; k++) {
            held = type->store(&at[k], (uint8_t *)&stored[k]);
            cr_assert_eq(held, stored[k] % 0x8000 < 0x7c00, "%x, %d", code, k);
        }
        const bool rises = code % 2 == 1;
        cr_assert(stored[0] == code && stored[1] == code && stored[2] == (rises ? next : code) &&
                      stored[3] == next,
                  "%x: %x %x %x %x", code, stored[0], stored[1], stored[2], stored[3]);
    }
}

/* The scale is 1, 0, or too small for its inverse; halves go away from zero. */
Test(gguf, values_are_rounded_to_the_nearest_of_q8_0)
{
    static const struct {
        float values[4];
        int8_t codes[4];
        uint16_t scale;
    } cases[] = {{{-127, 0.5f, -2.5f, 126.5f}, {-127, 1, -3, 127}, 0x3c00},
                 {{127, 0.499f, -1.5f, -126.499f}, {127, 0, -2, -126}, 0x3c00},
                 {{0, -0.0f, 0, 0}, {0, 0, 0, 0}, 0},
                 {{1e-36f, -1e-36f, 0, 0}, {0, 0, 0, 0}, 0}};
    const nd_gguf_type *type = &nd_gguf_types[ND_GGUF_Q8_0];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float values[32] = {0};
        uint8_t block[34];
        memcpy(values + 28, cases[i].values, sizeof cases[i].values); /* the last ones */
        cr_expect(type->store(values, block));
        cr_expect_arr_eq(block, &cases[i].scale, 2, "case %zu", i);
        cr_expect_arr_eq(block + 30, cases[i].codes, 4, "case %zu", i);
        values[31] = i % 2 ? NAN : -INFINITY;
        cr_expect_not(type->store(values, block));
    }
}

/* The head of a small file, without factors of RoPE. */
static nd_gguf_head take_head(void)
{
    nd_gguf_head h = {.path = write_file("m", ND_GGUF_BF16, 24), .keys = json_object()};
    assert_ok(nd_fs_map_open(h.path, ND_ERR_DATA, &h.map));
    assert_ok(nd_gguf_take_head(&h));
    h.list.tensors[0].name[0] = 'x';
    return h;
}

static void drop_head(nd_gguf_head *h)
{
    nd_safetensors_list_fini(&h->list);
    json_decref(h->keys);
    nd_fs_map_close(&h->map);
}

/* A file without values, in whose head a key has another value; NULL: it is not there. */
static const char *change_key(nd_gguf_head *h, const char *key, const char *value)
{
    const char *path = tempdir_file(&hf_dir, "changed");
    FILE *out = fopen(path, "wb");
    cr_assert_not_null(out);
    cr_assert_eq(value ? json_object_set_new(h->keys, key, json_loads(value, JSON_DECODE_ANY, NULL))
                       : json_object_del(h->keys, key),
                 0, "%s", key);
    nd_gguf_put_head(out, h->keys, &h->list);
    cr_assert_eq(ftruncate(fileno(out), (off_t)h->list.tensors[h->list.count - 1].end), 0);
    cr_assert_eq(fclose(out), 0);
    return path;
}

/* Each file keeps the changes of those before it, so what is checked first comes last. */
Test(gguf, keys_of_what_is_not_read)
{
    static const char *const cases[][3] = {
        {"tokenizer.ggml.pre", "\"default\"", "does not say how its tokenizer cuts"},
        {"tokenizer.ggml.add_eos_token", "true", "adds an end of text to every text"},
        {"tokenizer.ggml.model", "\"llama\"", "has no tokenizer.ggml.scores"},
        {"tokenizer.ggml.eot_token_id", "256", "has no tokenizer.ggml.tokens that"},
        {"llama.attention.sliding_window", "7", "has a sliding window"},
        {"llama.rope.scaling.type", "\"yarn\"", "scaled by yarn"},
        {"llama.attention.layer_norm_rms_epsilon", NULL, "has no llama.attention.layer_norm_rms_"},
        {"llama.attention.head_count", NULL, "has no llama.attention.head_count"},
        {"llama.feed_forward_length", NULL, "has no llama.feed_forward_length"},
        {"llama.block_count", NULL, "has no llama.block_count"},
        {"llama.embedding_length", NULL, "has no llama.embedding_length"},
        {"llama.context_length", NULL, "has no llama.context_length"},
        {"split.count", "2", "it is one of several files"},
        {"general.alignment", "1048575", "ends behind the file"},
        {"general.alignment", "0", "ends behind the file"},
    };
    nd_gguf_head h = take_head();
    nd_safetensors_list list;
    nd_shape shape;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(nd_gguf_open(change_key(&h, cases[i][0], cases[i][1]), &list, &shape, NULL),
                     ND_ERR_DATA, cases[i][2]);
    }
    drop_head(&h);
}

/* Each file keeps the changes of those before it. */
Test(gguf, numbers_that_a_file_leaves_out_or_names_otherwise)
{
    static const struct {
        const char *key, *value;
        size_t place;
        bool whole;
        double number;
    } cases[] = {
        {"llama.attention.head_count_kv", NULL, offsetof(nd_shape, kv_heads), true, 4},
        {"llama.vocab_size", NULL, offsetof(nd_shape, vocab), true, 256},
        {"llama.rope.freq_base", NULL, offsetof(nd_shape, rope.theta), false, 10000},
        {"llama.rope.scale_linear", "2.0", offsetof(nd_shape, rope.factor), false, 2},
        {"llama.rope.scaling.factor", "3.0", offsetof(nd_shape, rope.factor), false, 3},
        {"llama.rope.scaling.type", "\"none\"", offsetof(nd_shape, rope.factor), false, 1},
        {"tokenizer.ggml.eos_token_id", NULL, offsetof(nd_shape, eos_id), true, -1},
    };
    nd_gguf_head h = take_head();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nd_shape shape = shape_of(change_key(&h, cases[i].key, cases[i].value));
        const void *at = (const char *)&shape + cases[i].place;
        const double read = cases[i].whole ? (double)*(const int64_t *)at : *(const double *)at;
        cr_expect_eq(read, cases[i].number, "%s: %g", cases[i].key, read);
    }
    drop_head(&h);
}

/* A tokenizer of Llama 2's form writes a mark before a text and takes its blank away again, unless
 * the file says that it does not. */
Test(gguf, a_mark_before_a_text_is_that_of_the_file)
{
    static const char *const cases[][3] = {{"tokenizer.ggml.model", "\"llama\"", "-gt"},
                                           {"tokenizer.ggml.add_space_prefix", "false", "-eq"}};
    nd_gguf_head h = take_head();
    json_t *scores = json_array();
    for (int i = 0; i < 256; i++) {
        json_array_append_new(scores, json_integer(-i));
    }
    json_object_set_new(h.keys, "tokenizer.ggml.scores", scores);
    for (int i = 0; i < 2; i++) {
        nd_hf_reader *reader;
        assert_ok(nd_hf_reader_open(change_key(&h, cases[i][0], cases[i][1]), &reader));
        for (int k = 0; k < 2; k++) {
            hf_shell("test $(grep -c '\"%s\"' %s/tokenizer.json) %s 0", k ? "Strip" : "Prepend",
                     nd_hf_reader_folder(reader), cases[i][2]);
        }
        nd_hf_reader_close(reader);
    }
    drop_head(&h);
}

/* As readers of other programs require it; norms of 20 to 28 elements do not fill 32 bytes. */
Test(gguf, tensors_begin_and_files_end_at_multiples_of_32_bytes)
{
    struct stat st;
    nd_safetensors_list list;
    nd_shape shape;
    for (int64_t hidden = 20; hidden <= 28; hidden++) {
        const char *path = write_file("model.gguf", ND_GGUF_BF16, hidden);
        assert_ok(nd_gguf_open(path, &list, &shape, NULL));
        for (int64_t i = 0; i < list.count; i++) {
            cr_expect_eq(list.tensors[i].begin % 32, 0, "hidden %lld: %s", (long long)hidden,
                         list.tensors[i].name);
        }
        cr_expect(stat(path, &st) == 0 && st.st_size % 32 == 0, "hidden %lld", (long long)hidden);
        nd_safetensors_list_fini(&list);
        hf_shell("rm model.gguf");
    }
}

/* Files that are there with other texts, or lead elsewhere, are made anew. */
Test(gguf, files_of_the_cache_are_those_of_the_file)
{
    const char *path = write_file("model.gguf", ND_GGUF_BF16, 24);
    nd_hf_reader *reader;
    assert_ok(nd_hf_reader_open(path, &reader));
    const char *folder = printed("%s", nd_hf_reader_folder(reader));
    nd_hf_reader_close(reader);
    hf_shell("cd %s && sha256sum config.json tokenizer.json tokenizer_config.json "
             "generation_config.json >../sums",
             folder);
    hf_shell("cd %s && sed -i s/llama/qwen2/ config.json && : >tokenizer_config.json && "
             "rm tokenizer.json && ln -sf ../sums generation_config.json",
             folder);
    assert_ok(nd_hf_reader_open(path, &reader));
    cr_expect_eq(nd_hf_reader_shape(reader)->family, ND_FAMILY_LLAMA);
    nd_hf_reader_close(reader);
    hf_shell("cd %s && sha256sum --quiet -c ../sums && chmod -R a-w .", folder);
    assert_ok(nd_hf_reader_open(path, &reader)); /* also where nothing can be written */
    nd_hf_reader_close(reader);
    hf_shell("chmod -R u+w %s", folder);
}

/* Every beginning of the head, and every byte of it changed, gives a model or one sentence. */
Test(gguf, damaged_heads_give_a_sentence)
{
    char *whole = NULL, *bad = strdup(tempdir_file(&hf_dir, "bad.gguf"));
    size_t size = 0;
    nd_safetensors_list list;
    nd_shape shape;
    assert_ok(nd_fs_read(write_file("other.gguf", ND_GGUF_BF16, 24), 1 << 24, ND_ERR_DATA, &whole,
                         &size));
    for (size_t i = 0; i < 3000; i += i < 400 ? 1 : 37) {
        whole[i] ^= 0x55;
        tempdir_write(&hf_dir, "bad.gguf", whole, size);
        whole[i] ^= 0x55;
        if (nd_gguf_open(bad, &list, &shape, NULL) == ND_OK) {
            nd_safetensors_list_fini(&list);
        } else {
            cr_expect_eq(nd_error_last()->status, ND_ERR_DATA);
        }
        tempdir_write(&hf_dir, "bad.gguf", whole, i);
        cr_expect_eq(nd_gguf_open(bad, &list, &shape, NULL), ND_ERR_DATA, "%zu bytes", i);
    }
    tempdir_write(&hf_dir, "bad.gguf", whole, size - 64);
    assert_fails(nd_gguf_open(bad, &list, &shape, NULL), ND_ERR_DATA, "was cut off; copy it again");
    free(whole);
    free(bad);
}
