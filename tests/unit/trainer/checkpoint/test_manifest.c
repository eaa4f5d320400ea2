// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

static const nd_mesh mesh = {{1, 2, 3, 1, 2}};

static nd_manifest m, got; /* what is written, and what is read back */

static char *text_of(const nd_manifest *manifest, size_t *bytes)
{
    char *text = NULL;
    assert_ok(nd_manifest_format(manifest, &text, bytes));
    return text;
}

static void make_example(nd_shape shape)
{
    nd_manifest_fini(&m);
    m = fake_manifest(&shape, &mesh, ND_STATE_KINDS, 12, true);
    for (int i = 0; i < m.writer_count; i++) {
        m.writers[i].bytes = (uint64_t)(1000 + i);
        assert_ok(nd_digest_text(ND_CHECKSUM_XXH3, &i, sizeof i, m.writers[i].digest));
    }
}

/* The manifest's text, which is read back; owned by the caller. */
static char *read_back(void)
{
    size_t bytes = 0;
    char *text = text_of(&m, &bytes);
    nd_manifest_fini(&got);
    assert_ok(nd_manifest_parse(text, bytes, "f", &got));
    return text;
}

/* The manifest that was read is written as the same text. */
static void expect_text(const char *text)
{
    size_t bytes = 0;
    char *again = text_of(&got, &bytes);
    cr_assert_str_eq(text, again);
    free(again);
}

Test(manifest, is_read_back_as_it_was_written)
{
    make_example(fake_shape(false));
    char *text = read_back();
    cr_assert(got.position.step == 12 && got.position.recent.count == 0 && got.extra_count == 1);
    cr_assert_null(strstr(text, "recent_losses"));
    cr_assert_eq(got.position.skipped, m.position.skipped);
    cr_assert_eq(got.position.tokens_seen, m.position.tokens_seen);
    cr_assert_eq(got.writer_count, 12);
    cr_assert_str_eq(got.writers[11].digest, m.writers[11].digest);
    cr_assert_eq(got.shape.rms_eps, m.shape.rms_eps);
    cr_assert_eq(got.layout->param_count, m.layout->param_count);
    cr_assert_str_eq(nd_manifest_find(got.config, "train.steps"), "1000");
    expect_text(text);
    free(text);
}

static char *printed_of(const nd_shape *shape)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    nd_shape_print(shape, out);
    fclose(out);
    return text;
}

/* Each number that models of later kinds have, and as many tensors as a layer can have. */
Test(manifest, every_number_of_a_shape_is_read_back)
{
    nd_shape plain = fake_shape(false), shapes[6] = {plain, plain, plain, plain, plain, plain};
    shapes[0].family = ND_FAMILY_MISTRAL;
    shapes[0].window = 4096;
    shapes[1].family = ND_FAMILY_QWEN2;
    shapes[1].qkv_bias = 1;
    shapes[1].window = 11;
    shapes[1].more_ends[1] = 106;
    shapes[1].more_end_count = 2;
    nd_layer_set_add(&shapes[1].full, 0);
    nd_layer_set_add(&shapes[1].full, shapes[1].layers - 1);
    shapes[2].family = ND_FAMILY_PHI3;
    shapes[2].rotated = 2;
    shapes[3].qkv_bias = shapes[3].o_bias = shapes[3].mlp_bias = 1;
    shapes[3].layers = 9;
    shapes[4].family = ND_FAMILY_QWEN3;
    shapes[4].qkv_bias = shapes[4].o_bias = shapes[4].qk_norm = 1;
    shapes[4].layers = 9;
    shapes[4].rope = (nd_rope_config){.type = ND_ROPE_YARN,
                                      .theta = 1e6,
                                      .factor = 4,
                                      .original_max_positions = 32768,
                                      .beta_fast = 32,
                                      .beta_slow = 0.5,
                                      .attention_factor = 1.1,
                                      .exact_range = 1};
    shapes[5].family = ND_FAMILY_GRANITE;
    shapes[5].embedding_scale = 12, shapes[5].residual_scale = 0.22, shapes[5].attention_scale = 1;
    shapes[5].logits_divisor = 8;
    nd_layer_set_add(&shapes[5].unturned, 1);
    shapes[5].rope = (nd_rope_config){.type = ND_ROPE_LONGROPE,
                                      .theta = 1e4,
                                      .factor = 1,
                                      .original_max_positions = 4096,
                                      .attention_factor = 1.19,
                                      .query_beta = 0.1};
    for (int64_t i = 0; i < nd_shape_rotated(&shapes[5]) / 2; i++) {
        shapes[5].rope.short_factor[i] = 1.1f + (float)i;
        shapes[5].rope.long_factor[i] = 3.7f + (float)i;
    }
    for (int i = 0; i < 6; i++) {
        make_example(shapes[i]);
        char *text = read_back();
        char *printed = printed_of(&got.shape), *wanted = printed_of(&shapes[i]);
        cr_assert_str_eq(printed, wanted);
        free(printed);
        free(wanted);
        const bool lists = i == 1 || i == 5; /* older programs must not pass over them */
        cr_assert_not_null(strstr(text, lists ? "checkpoint\",\n \"version\": 2,"
                                              : "checkpoint\",\n \"version\": 1,"));
        cr_assert_eq(got.shape.more_end_count, shapes[i].more_end_count);
        cr_assert_arr_eq(got.shape.more_ends, shapes[i].more_ends, sizeof got.shape.more_ends);
        cr_assert_eq(got.shape.family, shapes[i].family);
        cr_assert_eq(memcmp(&got.shape.rope, &shapes[i].rope, sizeof got.shape.rope), 0);
        assert_ok(nd_shape_compare(&got.shape, "a", &shapes[i], "b"));
        free(text);
    }
}

/* Each number that changes a result tells two models apart. */
Test(manifest, models_differ_in_each_number_that_counts)
{
    nd_shape plain = fake_shape(false), x = plain;
    nd_rope_config *rope = &x.rope;
    int64_t *const whole[] = {&x.vocab,           &x.hidden,   &x.ffn,
                              &x.layers,          &x.heads,    &x.kv_heads,
                              &x.head_dim,        &x.qkv_bias, &x.o_bias,
                              &x.mlp_bias,        &x.qk_norm,  &x.post_norm,
                              &x.window,          &x.rotated,  &rope->original_max_positions,
                              &rope->exact_range, &x.bos_id,   &x.eos_id,
                              &x.max_positions};
    double *const real[] = {&x.rms_eps,         &rope->theta,      &rope->attention_factor,
                            &rope->factor,      &rope->beta_fast,  &rope->low_freq_factor,
                            &rope->beta_slow,   &rope->query_beta, &rope->high_freq_factor,
                            &x.window_theta,    &x.logits_divisor, &x.residual_scale,
                            &x.attention_scale, &x.embedding_scale};
    enum { WHOLE = sizeof whole / sizeof *whole, REAL = sizeof real / sizeof *real, IDLE = 3 };
    for (int i = 0; i < WHOLE + REAL + 3; i++) {
        x = plain;
        if (i < WHOLE) {
            ++*whole[i];
        } else if (i < WHOLE + REAL) {
            *real[i - WHOLE] = nextafter(*real[i - WHOLE], INFINITY);
        } else {
            x.tied = i == WHOLE + REAL;
            x.full.bits[0] = i == WHOLE + REAL + 1;
            x.unturned.bits[0] = i == WHOLE + REAL + 2;
        }
        const bool idle = i >= WHOLE - IDLE && i < WHOLE; /* the last whole numbers */
        const nd_status wanted = idle ? ND_OK : ND_ERR_CONFIG;
        cr_expect_eq(nd_shape_compare(&plain, "a", &x, "b"), wanted, "%d", i);
        cr_expect_eq(nd_shape_compare(&x, "b", &plain, "a"), wanted, "%d", i);
        char *printed[] = {printed_of(&plain), printed_of(&x)}; /* ranks compare digests of these */
        cr_expect(strcmp(printed[0], printed[1]) != 0, "%d", i);
        free(printed[0]);
        free(printed[1]);
    }
}

/* The oldest first, so that equal contents give equal bytes whatever came before them. */
Test(manifest, losses_are_read_back_in_their_order)
{
    static const int64_t counts[] = {1, ND_RECENT_LOSSES, ND_RECENT_LOSSES + 3};
    for (int c = 0; c < 3; c++) {
        make_example(fake_shape(false));
        nd_recent_losses *recent = &m.position.recent;
        for (int64_t i = 0; i < counts[c]; i++) {
            recent->value[i % ND_RECENT_LOSSES] = 1.0 / (double)(i + 1);
        }
        recent->count = counts[c];
        char *text = read_back();
        int64_t kept = nd_min(counts[c], ND_RECENT_LOSSES);
        cr_assert_eq(got.position.recent.count, kept);
        for (int64_t i = 0; i < kept; i++) {
            double oldest = 1.0 / (double)(counts[c] - kept + i + 1);
            cr_assert_eq(got.position.recent.value[i], oldest, "%d: %g", (int)i,
                         got.position.recent.value[i]);
        }
        expect_text(text);
        free(text);
    }
}

Test(manifest, every_flipped_bit_and_every_cut_is_noticed)
{
    make_example(fake_shape(false));
    size_t bytes = 0;
    char *text = text_of(&m, &bytes);
    for (size_t i = 0; i < bytes; i++) {
        text[i] ^= (char)(1 << (i % 8));
        cr_assert_eq(nd_manifest_parse(text, bytes, "f", &got), ND_ERR_DATA, "byte %zu of %zu", i,
                     bytes);
        text[i] ^= (char)(1 << (i % 8));
    }
    for (size_t i = 0; i < bytes; i += 1 + bytes / 300) {
        cr_assert_eq(nd_manifest_parse(text, i, "f", &got), ND_ERR_DATA, "cut at %zu", i);
    }
    free(text);
}

/* The manifest with one member changed, and a digest that is right. */
static nd_status parse_changed(const char *path_in_json, const char *value)
{
    make_example(fake_shape(false));
    size_t bytes = 0;
    char *text = text_of(&m, &bytes), path[128], *part = path, *next;
    json_t *root = json_loadb(text, bytes, 0, NULL), *object = root;
    snprintf(path, sizeof path, "%s", path_in_json);
    while ((next = strchr(part, '/'))) {
        *next = '\0';
        object = json_object_get(object, part);
        part = next + 1;
    }
    if (value) {
        json_object_set_new(object, part, json_loads(value, JSON_DECODE_ANY, NULL));
    } else {
        json_object_del(object, part);
    }
    json_object_del(root, "digest");
    free(text);
    text = json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    char digest[ND_DIGEST_TEXT_MAX], *whole = NULL;
    size_t body = strlen(text) - 2;
    assert_ok(nd_digest_text(m.checksum, text, body, digest));
    assert_ok(nd_fs_format(&whole, "%.*s,\n \"digest\": \"%s\"\n}\n", (int)body, text, digest));
    nd_manifest_fini(&got);
    nd_status status = nd_manifest_parse(whole, strlen(whole), "f", &got);
    free(whole);
    free(text);
    json_decref(root);
    return status;
}

Test(manifest, refuses_members_that_cannot_be)
{
#define EIGHT "0,0,0,0,0,0,0,0,"
    static const struct {
        const char *path, *value, *words;
    } bad[] = {
        {"format", "\"x\"", "is not the manifest"},
        {"version", "3", "reads up to version 2"},
        {"version", "0", "it must be 1"},
        {"cut/version", "2", "version is 2"},
        {"cut/chunk_bytes", "4096", "chunk_bytes is 4096"},
        {"cut/checksum", "\"md5\"", "unknown \"md5\""},
        {"position/step", "-1", "step is -1"},
        {"position/step", NULL, "step is missing"},
        {"position/step", "1.5", "not a whole number"},
        {"position/step", "1152921504606846977", "it must be 0 to 1152921504606846976"},
        {"position/skipped", "13", "skipped is 13"},
        {"position/tokens_seen", "1152921504606846977", "it must be 0 to 1152921504606846976"},
        {"position/samples_seen", "-1", "samples_seen is -1"},
        {"position/samples_seen", "11", "each of its 12 steps has at least one sample"},
        {"position/samples_seen", "1152921504606846977", "it must be 0 to 1152921504606846976"},
        {"position/recent_losses", "3", "no list of at most 64 numbers"},
        {"position/recent_losses", "[1,\"2\"]", "no list of at most 64 numbers"},
        {"position/recent_losses", "[" EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT "0]",
         "no list of at most 64 numbers"},
        {"mesh/tp", "0", "tp is 0"},
        {"mesh/tp", "3", "does not divide"},
        {"mesh/tp", "4", "one entry for each rank"},
        {"mesh/cp", "16777216", "more than 2^24"},
        {"mesh", "[]", "is not an object"},
        {"model/hidden_size", "0", "hidden_size is 0"},
        {"model/hidden_size", "23", "tensors are not"},
        {"model/hidden_size", "1099511627776", "extents that no model has"},
        {"model/num_hidden_layers", "4", "tensors are not"},
        {"model/num_hidden_layers", "1000000", "tensors are not"},
        {"model/full_attention_layers", "[3]", "full_attention_layers is not a list"},
        {"model/more_eos_token_ids", "[2, -1]", "more_eos_token_ids is not a list"},
        {"model/more_eos_token_ids", "[2147483648]", "more_eos_token_ids is not a list"},
        {"model/more_eos_token_ids", "[" EIGHT EIGHT "0]", "more_eos_token_ids is not a list"},
        {"model/window_first_layer", "2", "in place of a list of layers"},
        {"model/window_period", "2", "in place of a list of layers"},
        {"model/no_rope_layer_interval", "3", "in place of a list of layers"},
        {"model/qk_norm", "3", "qk_norm is 3; it must be 0 to 2"},
        {"model/sliding_window", "-1", "sliding_window is -1; it must be 0 to"},
        {"model/rotated", "3", "extents that no model has"},
        {"model/rotated", "6", "extents that no model has"}, /* head_dim is 4 */
        {"model/rope_type", "\"longrope\"", "rope_short_factor is not a number above 0"},
        {"model/rope_type", "\"ntk\"", "unknown \"ntk\""},
        {"model/rms_norm_eps", "\"1e-5\"", "no number"},
        {"model/tie_word_embeddings", "true", "tensors are not"},
        {"tensors/model.norm.weight", NULL, "tensors are not"},
        {"tensors/x", "{\"shape\":[4],\"split\":\"none\",\"segment\":\"hp\"}", "tensors are not"},
        {"tensors/model.norm.weight", "{\"shape\":[],\"split\":\"none\",\"segment\":\"hp\"}",
         "tensors are not"},
        {"tensors/model.norm.weight", "{\"shape\":[24],\"split\":\"up\",\"segment\":\"hp\"}",
         "tensors are not"},
        {"replicated/..", "3", "no name of an entry"},
        {"replicated/fp8.x", "0", "is 0"},
        {"replicated/fp8.x", "4294967297", "it must be 1 to 4294967296"},
        {"replicated", "{\"a/b\": 3}", "no name of an entry"},
        {"replicated", "{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,\"h\":1,\"i\":1}",
         "too many entries"},
        {"identity", "[]", "identity is not an object"},
        {"state/arrays", "[\"master\",\"exp_avg\"]", "not one that this program knows"},
        {"state/arrays", "[\"momentum\"]", "not one that this program knows"},
        {"state/dtype", "\"BF16\"", "not one that this program knows"},
        {"config/train.steps", "5", "is not a string"},
        {"written_by", NULL, "written_by is missing"},
        {"written_by/reason", "\"sixteen letters.\"", "too long"},
        {"writers", "[]", "one entry for each rank"},
    };
    static const char *const digests[] = {
        /* the last one is good */
        "sha256:0123456789abcdef0123456789abcdef", "xxh3:0123456789abcdeG0123456789abcdef",
        "xxh3:0123456789abcdef0123456789abcde", "xxh3:0123456789abcdef0123456789abcdef"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_fails(parse_changed(bad[i].path, bad[i].value), ND_ERR_DATA, bad[i].words);
    }
    for (int i = 0; i < 5; i++) { /* and with a size that is none */
        char entry[64], list[1024] = "[";
        snprintf(entry, sizeof entry, "[%d, \"%s\"]", i < 4 ? 7 : -1, digests[i < 4 ? i : 3]);
        for (int rank = 0; rank < 12; rank++) {
            strcat(strcat(list, rank > 0 ? "," : ""), entry);
        }
        nd_status status = parse_changed("writers", strcat(list, "]"));
        cr_expect_eq(status, i == 3 ? ND_OK : ND_ERR_DATA, "%d", i);
    }
    assert_ok(parse_changed("a_later_member", "[1]"));
    /* Steps may have had fewer samples before, and samples may have been passed over. */
    assert_ok(parse_changed("position/samples_seen", "12"));
    assert_ok(parse_changed("position/samples_seen", "1152921504606846976"));
}
