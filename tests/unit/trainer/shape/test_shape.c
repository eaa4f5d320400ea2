// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/runtime/config/support.h"

#include <math.h>

#include "runtime/config/reader.h"
#include "tests/support/shell.h"
#include "trainer/layout/layout.h"

/* Reads the config.json of a model of this family with these keys, and the sizes that they leave
 * out; without a family, this text. Texts have ' for ". */
static nd_status parse(const char *family, const char *keys, nd_shape *shape)
{
    static const struct {
        const char *key;
        int value;
    } sizes[] = {{"'vocab_size'", 100},        {"'hidden_size'", 64},
                 {"'intermediate_size'", 96},  {"'num_hidden_layers'", 2},
                 {"'num_attention_heads'", 4}, {"'num_key_value_heads'", 2}};
    char text[2048];
    int used = snprintf(text, sizeof text, "%s", keys);
    if (family) {
        used = snprintf(text, sizeof text, "{'model_type': '%s'%s%s", family, keys[0] ? ", " : "",
                        keys);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            if (!strstr(keys, sizes[i].key)) {
                used += snprintf(text + used, sizeof text - (size_t)used, ", %s: %d", sizes[i].key,
                                 sizes[i].value);
            }
        }
        used += snprintf(text + used, sizeof text - (size_t)used, "}");
    }
    for (char *quote = text; (quote = strchr(quote, '\''));) {
        *quote = '"';
    }
    return nd_shape_parse(text, (size_t)used, "c.json", shape);
}

static nd_shape parsed(const char *family, const char *keys)
{
    nd_shape shape;
    assert_ok(parse(family, keys, &shape));
    return shape;
}

/* With a message that has the words. */
static void refused(const char *family, const char *keys, const char *words)
{
    nd_shape shape;
    char all[1024];
    snprintf(all, sizeof all, "c.json|%s", words);
    expect_sentence(parse(family, keys, &shape), ND_ERR_DATA, all);
}

static void write_and_read(const nd_shape *shape, nd_shape *back)
{
    tempdir dir;
    tempdir_make(&dir);
    memset(back, 0, sizeof *back);
    assert_ok(nd_shape_write(shape, "bfloat16", tempdir_file(&dir, "config.json")));
    assert_ok(nd_shape_read(dir.name, back));
    tempdir_remove(&dir);
}

Test(shape, defaults_of_hugging_face)
{
    const nd_shape s =
        parsed(NULL, "{'model_type': 'llama', 'vocab_size': 100, 'hidden_size': 64, "
                     "'intermediate_size': 96, 'num_hidden_layers': 2, 'num_attention_heads': 4}");
    cr_expect(!s.tied && s.rope.type == ND_ROPE_DEFAULT && s.rope.theta == 10000);
    cr_expect(s.eos_is_default);
}

Test(shape, keys_that_change_nothing_are_skipped)
{
    const nd_shape s =
        parsed("llama", "'transformers_version': '4.40', 'use_cache': false, 'pretraining_tp': 2, "
                        "'attention_bias': false, 'hidden_act': 'silu', 'sliding_window': null, "
                        "'attention_dropout': 0.0, 'head_dim': null, 'num_key_value_heads': null, "
                        "'eos_token_id': [7, 8], 'bos_token_id': null, 'architectures': ['Other', "
                        "'LlamaForCausalLM', 'x']");
    cr_expect(s.eos_id == 7 && !s.eos_is_default && s.bos_id == -1);
    const nd_shape limits =
        parsed("llama", "'bos_token_id': -1, 'architectures': [], 'hidden_size': 4096, "
                        "'rope_scaling': {'type': 'linear', 'factor': 2, 'beta_fast': null}");
    cr_expect(limits.bos_id == -1 && limits.head_dim == 1024 && limits.rope.factor == 2);
}

Test(shape, all_ends_of_text_are_written_back)
{
    nd_shape s = parsed("llama", "'eos_token_id': [7, 0, 9]"), back;
    write_and_read(&s, &back);
    cr_expect(back.eos_id == 7 && back.more_end_count == 2 && back.more_ends[0] == 0 &&
              back.more_ends[1] == 9);
}

#define ENDS "'eos_token_id': [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"
Test(shape, ends_of_text_have_a_limit)
{
    const nd_shape s = parsed("llama", ENDS "]");
    cr_expect(s.more_end_count == ND_ENDS_MAX && s.more_ends[ND_ENDS_MAX - 1] == 16);
    refused("llama", ENDS ", 17]", "entry 17 of eos_token_id|one of too many");
}

Test(shape, an_end_of_text_that_is_null_is_no_default)
{
    const nd_shape s = parsed("llama", "'eos_token_id': null");
    cr_expect(s.eos_id == -1 && !s.eos_is_default);
}

Test(shape, both_rope_spellings)
{
    static const char *const spellings[] = {
        "'rope_theta': 500000, 'rope_scaling': {'rope_type': 'llama3', 'factor': 8, "
        "'low_freq_factor': 1, 'high_freq_factor': 4, 'original_max_position_embeddings': 8192}",
        "'rope_scaling': null, 'rope_parameters': {'rope_type': 'llama3', 'factor': 8, "
        "'low_freq_factor': 1, 'high_freq_factor': 4, 'rope_theta': 500000.0, "
        "'original_max_position_embeddings': 8192}",
        "'rope_theta': 500000, 'rope_scaling': {'type': 'llama3', 'factor': 8.0, "
        "'low_freq_factor': 1, 'high_freq_factor': 4, 'original_max_position_embeddings': 8192}",
    };
    nd_shape s;
    for (int i = 0; i < 3; i++) {
        s = parsed("llama", spellings[i]);
        cr_expect(s.rope.type == ND_ROPE_LLAMA3 && s.rope.theta == 500000 && s.rope.factor == 8 &&
                      s.rope.low_freq_factor == 1 && s.rope.high_freq_factor == 4 &&
                      s.rope.original_max_positions == 8192,
                  "%s", spellings[i]);
    }
    s = parsed("llama", "'rope_scaling': {'type': 'linear', 'factor': 2}");
    cr_expect(s.rope.type == ND_ROPE_LINEAR && s.rope.factor == 2);
    s = parsed("llama", "'rope_parameters': {'rope_type': 'default', 'rope_theta': 7e5, "
                        "'partial_rotary_factor': 1.0}");
    cr_expect_eq(s.rope.theta, 7e5);
}

Test(shape, rope_that_is_not_understood)
{
    refused("llama", "'rope_scaling': {'rope_type': 'ntk', 'factor': 2}",
            "\"ntk\"|dynamic, llama3, yarn and longrope");
    refused("llama", "'rope_scaling': {'rope_type': 'yarn', 'factor': 2}",
            "original_max_position_embeddings is missing|an integer");
    refused("llama", "'rope_scaling': {'rope_type': 'dynamic'}", "factor is missing|a number");
    refused("llama", "'rope_scaling': {'rope_type': 3}", "rope_type|llama3");
    refused("llama", "'rope_scaling': {'rope_type': 'llama3'}", "factor is missing");
    refused("llama", "'rope_scaling': {'rope_type': 'linear', 'factor': 0.5}", "0.5|supported");
    refused("llama", "'rope_scaling': {'rope_type': 'linear', 'factor': 2, 'beta_fast': 3}",
            "beta_fast|not supported");
    refused("llama", "'rope_parameters': {'partial_rotary_factor': 0.5}", "partial_rotary_factor");
    refused("llama", "'rope_scaling': {}, 'rope_parameters': {}", "rope_scaling|keep one");
    refused("llama", "'rope_theta': 1e4, 'rope_parameters': {'rope_theta': 5e5}", "500000|10000");
    refused("llama", "'rope_scaling': 3", "rope_scaling is an integer|a map");
    refused("llama",
            "'rope_scaling': {'rope_type': 'llama3', 'factor': 8, 'low_freq_factor': 4, "
            "'high_freq_factor': 4, 'original_max_position_embeddings': 8192}",
            "high_freq_factor 4|low_freq_factor 4");
}

Test(shape, other_models_are_refused)
{
    refused("llama", "'attention_out_bias': true", "attention_out_bias is true|model_type llama");
    refused("llama", "'use_qk_norm': true", "use_qk_norm is true|only false");
    refused("llama", "'use_bias': true", "use_bias is true|only false");
    refused("phi3", "'resid_pdrop': 0.1", "resid_pdrop is 0.1");
    refused("phi3", "'embd_pdrop': 0.1", "embd_pdrop is 0.1");
    refused("llama", "'attn_logit_softcapping': 50.0", "attn_logit_softcapping is set|not capped");
    refused("llama", "'attention_bias': 1", "attention_bias is an integer|true or false");
    refused("llama", "'hidden_act': 3", "hidden_act is an integer|it must be \"silu\"");
    refused("llama", "'hidden_act': 'gelu'",
            "hidden_act is \"gelu\"|only \"silu\" is supported, so use a model");
    refused("llama", "'sliding_window': 4096", "sliding_window is set|mistral");
    refused("llama", "'quantization_config': {}", "quantization_config");
    refused("llama", "'architectures': ['LlamaForSequenceClassification']",
            "architectures|LlamaForCausalLM");
    refused("bert", "", "model_type is \"bert\"|llama, mistral, ministral, qwen2, qwen3");
    refused("qwen4", "", "model_type is \"qwen4\"|the nearest is qwen");
    refused("lama", "", "model_type is \"lama\"|the nearest is llama");
    refused(NULL, "{}", "model_type is missing|llama");
}

Test(shape, numbers)
{
    refused(NULL, "{'model_type': 'llama'}", "vocab_size is missing|an integer");
    refused("llama", "'num_key_value_heads': 3", "num_attention_heads 4|num_key_value_heads 3");
    refused("llama", "'num_key_value_heads': 0", "num_key_value_heads is 0|1 to");
    refused("llama", "'head_dim': 15", "head_dim is 15|even");
    refused("llama", "'head_dim': '16'", "head_dim is text|an integer");
    refused("llama", "'num_attention_heads': 5, 'num_key_value_heads': 5",
            "hidden_size 64 is not a multiple of num_attention_heads 5|no head_dim");
    refused("llama", "'rms_norm_eps': -1", "rms_norm_eps is -1|supported");
    refused("llama", "'tie_word_embeddings': 1", "tie_word_embeddings is an integer|true or false");
    refused("llama", "'eos_token_id': 'x'", "eos_token_id|token id");
    refused("llama", "'eos_token_id': [1, -1]", "entry 1 of eos_token_id|a list of up to 17 ids");
    refused("llama", "'eos_token_id': [1, 2147483648]", "entry 1 of eos_token_id");
    refused("llama", "'bos_token_id': 2147483648", "bos_token_id must be a token id");
    refused("llama", "'bos_token_id': -2", "bos_token_id must be a token id");
    cr_expect_eq(parsed("llama", "'num_hidden_layers': 4096").layers, ND_LAYERS_MAX);
    refused("llama", "'num_hidden_layers': 4097", "num_hidden_layers is 4097|1 to 4096");
    refused("llama", "'vocab_size': 99999999999", "99999999999|1 to");
    refused("llama", "'vocab_size': 1e3", "vocab_size is a real|an integer");
    refused("llama", "'hidden_size': 63", "hidden_size 63|num_attention_heads 4");
    refused("llama", "'hidden_size': 8192", "head_dim is 2048|at most 1024");
}

Test(shape, a_misspelt_key_is_not_passed_over)
{
    refused("llama", "'head_dims': 8", "the key head_dims|write head_dim if");
    refused("llama", "'Tie_word_embeddings': true",
            "the key Tie_word_embeddings|write tie_word_embeddings if");
    refused("llama", "'ropetheta': 1e6", "the key ropetheta|write rope_theta if");
    refused("llama", "'rop_thetas': 1e6", "the key rop_thetas|write rope_theta if");
    static const char keys[] =
        "attention_bias attention_multiplier embedding_multiplier hidden_act initializer_range "
        "layer_types logits_scaling max_position_embeddings mlp_bias no_rope_layers "
        "num_key_value_heads original_max_position_embeddings partial_rotary_factor "
        "quantization_config query_pre_attn_scalar residual_multiplier rms_norm_eps "
        "rope_local_base_freq rope_parameters rope_scaling sliding_window use_sliding_window";
    char key[64], pair[80], words[80];
    for (int i = 0; nd_list_word(keys, ' ', i, key, sizeof key); i++) {
        snprintf(pair, sizeof pair, "'%sx': 1", key);
        snprintf(words, sizeof words, "write %s if", key);
        refused("llama", pair, words);
    }
}

Test(shape, broken_json)
{
    refused(NULL, "{'a': 1", "c.json:1|broken JSON");
    refused(NULL, "{'a': 1, 'a': 2}", "broken JSON|duplicate");
    refused(NULL, "[1]", "c.json is a list|a map");
    refused(NULL, "", "broken JSON");
    nd_shape s;
    expect_sentence(nd_shape_read("/nonexistent/config.json", &s), ND_ERR_DATA,
                    "/nonexistent/config.json");
}

/* A line that the config.json of the shape has. */
static void expect_written(const nd_shape *shape, const char *line)
{
    tempdir dir;
    tempdir_make(&dir);
    assert_ok(nd_shape_write(shape, "bfloat16", tempdir_file(&dir, "config.json")));
    shell(&dir, shell_line("grep '%s' config.json", line));
    tempdir_remove(&dir);
}

/* Lines for a reader that does not know layer_types. */
static const char first_window_1[] = "\"max_window_layers\": 1,",
                  first_window_2[] = "\"max_window_layers\": 2,";

Test(shape, writing_and_reading_back)
{
    static const nd_rope_config ropes[] = {{ND_ROPE_LLAMA3, 500000, 32, 1, 4, 8192},
                                           {.type = ND_ROPE_YARN,
                                            .theta = 1e6,
                                            .factor = 4,
                                            .low_freq_factor = 1,
                                            .high_freq_factor = 1,
                                            .original_max_positions = 8192,
                                            .beta_fast = 31,
                                            .beta_slow = 1.5,
                                            .attention_factor = 1.25,
                                            .exact_range = 1},
                                           {ND_ROPE_LINEAR, 10000, 2, 1, 1, 0},
                                           {ND_ROPE_DEFAULT, 10000, 1, 1, 1, 0}};
    nd_shape s, back;
    memset(&s, 0, sizeof s);
    s.rope = ropes[0];
    s.vocab = 1000, s.hidden = 48, s.ffn = 100, s.layers = 3, s.heads = 6, s.kv_heads = 2;
    s.head_dim = 10, s.max_positions = 4096, s.rms_eps = 1e-5, s.init_std = 0.0123456789012345678;
    s.tied = true, s.bos_id = -1, s.eos_id = 9;
    write_and_read(&s, &back);
    cr_expect(back.vocab == 1000 && back.hidden == 48 && back.ffn == 100 && back.layers == 3 &&
              back.heads == 6 && back.kv_heads == 2 && back.head_dim == 10 &&
              back.max_positions == 4096 && back.tied && back.bos_id == -1 && back.eos_id == 9);
    cr_expect_eq(back.rms_eps, 1e-5);
    cr_expect_eq(back.init_std, s.init_std, "every bit");
    for (size_t i = 0; i < sizeof ropes / sizeof *ropes; i++) {
        s.rope = ropes[i];
        write_and_read(&s, &back);
        cr_expect_eq(memcmp(&back.rope, &s.rope, sizeof s.rope), 0, "rope %zu", i);
    }
    expect_sentence(nd_shape_write(&s, "float32", "/nonexistent/config.json"), ND_ERR_CANTCREATE,
                    "/nonexistent/config.json");
}

static nd_shape family_of(const char *family, const char *keys)
{
    nd_shape s = parsed(family, keys), back;
    write_and_read(&s, &back);
    cr_expect(
        back.family == s.family && back.qkv_bias == s.qkv_bias && back.o_bias == s.o_bias &&
            back.mlp_bias == s.mlp_bias && back.qk_norm == s.qk_norm &&
            back.post_norm == s.post_norm && back.window == s.window && back.rotated == s.rotated &&
            memcmp(&back.unturned, &s.unturned, sizeof s.unturned) == 0 && back.tied == s.tied &&
            memcmp(&back.rope, &s.rope, sizeof s.rope) == 0 && back.rope.theta == s.rope.theta &&
            memcmp(&back.full, &s.full, sizeof s.full) == 0 && back.head_dim == s.head_dim &&
            back.kv_heads == s.kv_heads && back.max_positions == s.max_positions &&
            back.bos_id == s.bos_id && back.embedding_scale == s.embedding_scale &&
            back.residual_scale == s.residual_scale && back.attention_scale == s.attention_scale &&
            back.logits_divisor == s.logits_divisor && back.window_theta == s.window_theta &&
            back.rms_eps == s.rms_eps && back.eos_id == s.eos_id,
        "%s of %s reads back as it was", family, keys);
    return s;
}

Test(shape, families_have_their_switches_and_defaults)
{
    nd_shape s = family_of("llama", "");
    cr_expect(!s.qkv_bias && !s.o_bias && !s.mlp_bias && !s.qk_norm && s.bos_id == 1);
    cr_expect_not(nd_shape_has(&s, ND_PARAM_Q_BIAS));
    s = family_of("llama", "'attention_bias': true");
    cr_expect(s.qkv_bias && s.o_bias && !s.mlp_bias);
    s = family_of("qwen2", "'use_sliding_window': false, 'sliding_window': 4096");
    cr_expect(s.qkv_bias && !s.o_bias && !s.mlp_bias && !s.qk_norm);
    cr_expect(s.head_dim == 16 && s.max_positions == 32768 && s.bos_id == -1 && s.eos_id == -1);
    cr_expect(nd_shape_has(&s, ND_PARAM_Q_BIAS) && !nd_shape_has(&s, ND_PARAM_O_BIAS));
    s = family_of("qwen3", "");
    cr_expect(!s.qkv_bias && s.qk_norm && s.head_dim == 128);
    s = family_of("seed_oss", "'attention_dropout': 0.0, 'residual_dropout': 0.0");
    cr_expect(s.qkv_bias && !s.o_bias && s.head_dim == 128 && s.bos_id == 0);
    /* 100 x 64 twice, 64; a block: q 512 x 64, k and v 256 x 64, their biases, o, MLP, norms */
    cr_expect_eq(nd_shape_parameters(&s),
                 2 * 6400 + 64 + 2 * (512 * 65 + 2 * 256 * 65 + 64 * 512 + 3 * 6144 + 128));
    refused("qwen2", "'attention_bias': true", "attention_bias is true|model_type qwen2");
    refused("qwen2", "'use_sliding_window': true, 'sliding_window': 0", "sliding_window is 0|1 to");
    s = family_of("mistral", "");
    cr_expect_eq(nd_shape_window(&s, 1, 8192), 4096, "transformers' default");
    cr_expect_eq(nd_shape_window(&s, 1, 4096), 0, "no row sees less for it");
    s = family_of("mistral", "'sliding_window': null");
    cr_expect_eq(s.window, 0);
    s = family_of("qwen3",
                  "'use_sliding_window': true, 'sliding_window': 7, 'max_window_layers': 1");
    cr_expect(nd_shape_window(&s, 0, 99) == 0 && nd_shape_window(&s, 1, 99) == 7);
    expect_written(&s, first_window_1);
    s = family_of("ministral",
                  "'sliding_window': 7, 'layer_types': ['sliding_attention', 'full_attention']");
    cr_expect(nd_shape_window(&s, 0, 99) == 7 && nd_shape_window(&s, 1, 99) == 0);
    s = family_of("phi3", "'partial_rotary_factor': 0.75");
    cr_expect(s.window == 0 && s.rotated == 12 && nd_shape_rotated(&s) == 12 && s.eos_id == 32000);
    s = family_of("phi3", "'sliding_window': 2047");
    cr_expect(s.window == 2047 && s.rotated == 0 && nd_shape_rotated(&s) == 16);
    expect_written(&s, "\"pad_token_id\": null,");
    expect_written(&s, "\"torch_dtype\": \"bfloat16\",");
    refused("phi3", "'partial_rotary_factor': 0.0", "is 0|at least 2");
    refused("phi3", "'partial_rotary_factor': 0.7",
            "partial_rotary_factor 0.7 of head_dim 16 is 11|even");
    refused("mistral", "'partial_rotary_factor': 0.5", "partial_rotary_factor is 0.5|only 1");
    refused("phi3", "'rope_scaling': {'type': 'linear', 'factor': 2}",
            "rope_type is \"linear\"|only default and longrope");
    refused("ministral", "'layer_types': ['full_attention']",
            "layer_types is a list of 1|num_hidden_layers 2");
    refused("llama", "'layer_types': ['full_attention']",
            "layer_types is a list of 1|num_hidden_layers 2");
    refused("llama", "'layer_types': 3", "layer_types is an integer|a list of num_hidden_layers 2");
    refused("qwen2", "'layer_types': ['full_attention', 3]",
            "layer_types has an integer for layer 1|sliding_attention");
    refused("ministral", "'layer_types': ['full_attention', 'x']",
            "layer_types has \"x\" for layer 1|sliding_attention");
    s = family_of("qwen2", "'use_sliding_window': true, 'sliding_window': 7, 'num_hidden_layers': "
                           "4, 'max_window_layers': 4, 'layer_types': ['full_attention', "
                           "'sliding_attention', 'full_attention', 'sliding_attention']");
    for (int64_t l = 0; l < 4; l++) {
        cr_expect_eq(nd_shape_window(&s, l, 99), l % 2 ? 7 : 0, "layer %ld", (long)l);
    }
    expect_written(&s, first_window_1);
    s = family_of("qwen2", "");
    expect_written(&s, first_window_2);
    s = parsed("qwen2", "'num_hidden_layers': 29, 'use_sliding_window': true, 'sliding_window': 7");
    cr_expect(nd_shape_window(&s, 27, 99) == 0 && nd_shape_window(&s, 28, 99) == 7, "by default");
    refused("mistral", "'layer_types': []", "layer_types is set|mistral");
    refused("seed_oss", "'residual_dropout': 0.1", "attention_dropout is absent|means 0.1");
    refused("seed_oss", "'attention_dropout': 0", "residual_dropout is absent|write 0");
    refused("llama", "'attention_dropout': 0.1", "attention_dropout is 0.1|write 0");
}

/* The values of keys that are absent, and the biases that a file may ask for: 1 for q, k and v, 2
 * for o, 4 for the MLP. */
Test(shape, families_have_the_numbers_of_transformers)
{
    enum { NO = -1 }; /* refused */
    static const char *const keys[] = {"", ", 'attention_bias': true",
                                       ", 'attention_out_bias': true", ", 'mlp_bias': true"};
    static const struct {
        const char *family;
        int64_t kv_heads, head_dim, positions, window, bos, eos;
        double eps;
        int biases[4]; /* with each of the keys */
    } rows[] = {
        {"llama", 32, 16, 2048, 0, 1, 2, 1e-6, {0, 3, NO, 4}},
        {"mistral", 8, 16, 131072, 4096, 1, 2, 1e-6, {0, NO, NO, NO}},
        {"ministral", 8, 16, 131072, 4096, 1, 2, 1e-6, {0, NO, NO, NO}},
        {"qwen2", 32, 16, 32768, 0, -1, -1, 1e-6, {1, NO, NO, NO}},
        {"qwen3", 32, 128, 32768, 0, -1, -1, 1e-6, {0, 3, NO, NO}},
        {"seed_oss", 8, 128, 524288, 0, 0, 2, 1e-6, {1, 1, 3, 5}},
        {"phi3", 32, 16, 4096, 0, 1, 32000, 1e-5, {0, NO, NO, NO}},
        {"granite", 32, 16, 2048, 0, 1, 2, 1e-6, {0, 3, NO, 4}},
        {"smollm3", 4, 16, 32768, 0, 128000, 128001, 1e-6, {0, 3, NO, 4}},
        {"ministral3", 8, 128, 262144, 0, 1, 2, 1e-5, {0, NO, NO, NO}},
        {"olmo2", 32, 16, 2048, 0, -1, 50279, 1e-5, {0, 3, NO, NO}},
        {"olmo3", 32, 16, 2048, 4096, -1, 50279, 1e-5, {0, 3, NO, NO}},
        {"exaone4", 32, 16, 2048, 4096, 0, 2, 1e-5, {0, NO, NO, NO}},
        {"glm4", 2, 128, 131072, 0, -1, 151329, 1.5625e-7, {1, 1, NO, NO}},
        {"gemma3_text", 4, 256, 131072, 4096, 2, 1, 1e-6, {0, 3, NO, NO}},
    };
    cr_assert_eq(sizeof rows / sizeof *rows, ND_FAMILY_COUNT);
    for (size_t i = 0; i < 4 * ND_FAMILY_COUNT; i++) {
        char text[512];
        nd_shape s;
        snprintf(text, sizeof text,
                 "{'model_type': '%s', 'vocab_size': 100, 'hidden_size': 512, "
                 "'intermediate_size': 96, 'num_hidden_layers': 2, 'num_attention_heads': 32, "
                 "'attention_dropout': 0, 'residual_dropout': 0%s}",
                 rows[i / 4].family, keys[i % 4]);
        const bool good = parse(NULL, text, &s) == ND_OK;
        const int64_t biases = good ? s.qkv_bias + 2 * s.o_bias + 4 * s.mlp_bias : NO;
        cr_expect_eq(biases, rows[i / 4].biases[i % 4], "%s: %ld", text, (long)biases);
        cr_expect(!good ||
                      (s.kv_heads == rows[i / 4].kv_heads && s.head_dim == rows[i / 4].head_dim &&
                       s.max_positions == rows[i / 4].positions && s.bos_id == rows[i / 4].bos &&
                       s.eos_id == rows[i / 4].eos && s.rms_eps == rows[i / 4].eps &&
                       s.window == rows[i / 4].window && s.init_std == 0.02),
                  "%s", text);
    }
}

Test(shape, layers_without_rope)
{
    nd_shape s = family_of(
        "smollm3",
        "'no_rope_layer_interval': 2, 'layer_types': ['full_attention', 'full_attention']");
    cr_expect(nd_shape_turns(&s, 0) && !nd_shape_turns(&s, 1));
    cr_expect(s.tied && s.rope.theta == 2e6, "the defaults of the family");
    s = family_of("smollm3", "");
    cr_expect(nd_shape_turns(&s, 0) && nd_shape_turns(&s, 1), "each fourth of two layers");
    s = family_of("smollm3", "'num_hidden_layers': 4");
    cr_expect_eq(s.unturned.bits[0], 8);
    s = family_of("smollm3", "'no_rope_layers': [0, 1]");
    cr_expect(!nd_shape_turns(&s, 0) && nd_shape_turns(&s, 1), "the list goes before the interval");
    s = family_of("smollm3", "'no_rope_layers': [0, 0]");
    cr_expect(!nd_shape_turns(&s, 0) && !nd_shape_turns(&s, 1));
    s = family_of("llama", "'no_rope_layers': [1, 1]");
    refused("smollm3", "'no_rope_layers': [0, 2]",
            "no_rope_layers has 2 for layer 1|supported are 0");
    refused("smollm3", "'no_rope_layers': [0, '1']", "no_rope_layers has text for layer 1|and 1");
    refused("smollm3", "'no_rope_layers': 4",
            "no_rope_layers is an integer|a list of num_hidden_layers 2");
    refused("smollm3", "'no_rope_layers': [1]",
            "no_rope_layers is a list of 1|num_hidden_layers 2");
    refused("smollm3", "'no_rope_layers': [1, 0, 1]",
            "no_rope_layers is a list of 3|num_hidden_layers 2");
    refused("llama", "'no_rope_layers': [1, 0]", "layer 1 has no RoPE|model_type llama");
    refused("llama", "'no_rope_layer_interval': 2", "layer 1 has no RoPE|model_type llama");
    refused("smollm3", "'use_sliding_window': true", "use_sliding_window is true|only false");
    refused("llama", "'layer_types': ['full_attention', 'sliding_attention']",
            "sliding_attention for layer 1|only full_attention");
}

Test(shape, a_frequency_for_each_pair)
{
    nd_shape s = family_of(
        "phi3",
        "'head_dim': 4, 'max_position_embeddings': 131072, 'original_max_position_embeddings': 8, "
        "'rope_scaling': {'type': 'su', 'short_factor': [1, 1.25], 'long_factor': [2, 4]}");
    float cosines[2 * 9 * 2], sines[2 * 9 * 2];
    cr_expect_float_eq(s.rope.attention_factor, sqrt(1 + log(16384) / log(8)), 1e-12);
    for (int64_t positions = 8; positions <= 9; positions++) {
        const double slowed = positions > 8 ? 4 : 1.25;
        nd_rope_table(&s.rope, 4, positions, false, cosines, sines);
        cr_expect_float_eq(sines[7 * 2 + 1], s.rope.attention_factor * sin(7 * 0.01 / slowed),
                           1e-6);
    }
    s = family_of("llama", "'head_dim': 4, 'original_max_position_embeddings': 256, "
                           "'rope_scaling': {'rope_type': 'longrope', 'factor': 16, "
                           "'original_max_position_embeddings': 512, 'short_factor': [1, 1.25], "
                           "'long_factor': [2, 4]}");
    cr_expect_float_eq(s.rope.attention_factor, sqrt(1 + log(16) / log(256)), 1e-12);
    refused(
        "phi3",
        "'rope_scaling': {'type': 'longrope', 'short_factor': [1, 1.25], 'long_factor': [2, 4]}",
        "short_factor|8 numbers");
    s = family_of("phi3", "'head_dim': 4, 'max_position_embeddings': 64, 'rope_scaling': {'type': "
                          "'yarn', 'short_factor': [1, 2], 'long_factor': [2, 4]}");
    cr_expect(s.rope.type == ND_ROPE_LONGROPE && s.rope.original_max_positions == 4096 &&
                  s.rope.attention_factor == 1,
              "its older name, and the family's number");
    refused("phi3",
            "'head_dim': 4, 'rope_scaling': {'type': 'longrope', 'short_factor': [1, 0], "
            "'long_factor': [1, 1]}",
            "short_factor|above 0");
    refused("llama", "'head_dim': 258, 'rope_scaling': {'type': 'longrope'}",
            "turns 258 elements of a head|up to 256");
}

#define YARN "'rope_scaling': {'type': 'yarn', 'original_max_position_embeddings': 64, 'factor': "
Test(shape, yarn_and_dynamic_have_defaults)
{
    nd_shape s = family_of("llama", YARN "4}");
    cr_expect(s.rope.beta_fast == 32 && s.rope.beta_slow == 1 && !s.rope.exact_range);
    cr_expect_float_eq(s.rope.attention_factor, 0.1 * log(4) + 1, 1e-12);
    s = family_of("llama", YARN "4, 'mscale': 2, 'mscale_all_dim': 1}");
    cr_expect_float_eq(s.rope.attention_factor, (0.2 * log(4) + 1) / (0.1 * log(4) + 1), 1e-12);
    s = family_of("llama", YARN "4, 'mscale': 2}");
    cr_expect_float_eq(s.rope.attention_factor, 0.1 * log(4) + 1, 1e-12, "both or none");
    s = family_of("llama", YARN "1}");
    cr_expect_eq(s.rope.attention_factor, 1);
    s = family_of("llama", "'rope_scaling': {'type': 'dynamic', 'factor': 3}");
    cr_expect(s.rope.type == ND_ROPE_DYNAMIC && s.rope.factor == 3);
}

Test(shape, queries_that_grow)
{
    nd_shape s = family_of("ministral3", "");
    cr_expect(s.rope.type == ND_ROPE_YARN && s.rope.factor == 16 && s.rope.query_beta == 0.1 &&
              s.rope.original_max_positions == 16384 && s.rope.theta == 1e6);
    s = family_of("ministral3", YARN "4}");
    cr_expect_eq(s.rope.query_beta, 0);
    refused("mistral", "'rope_scaling': {'type': 'yarn', 'factor': 2, 'llama_4_scaling_beta': 0.1}",
            "llama_4_scaling_beta is not supported|model_type mistral");
    refused("ministral3", "'rope_parameters': {'rope_theta': 10000}",
            "rope_type is \"default\"|model_type ministral3 only yarn");
}

Test(shape, norms_behind)
{
    nd_shape s = family_of("olmo2", "'attention_bias': true");
    cr_expect(s.post_norm == 1 && s.qk_norm == 2 && s.qkv_bias && s.o_bias && s.eos_id == 50279);
    cr_expect(!nd_shape_has(&s, ND_PARAM_NORM_1) && nd_shape_has(&s, ND_PARAM_POST_1) &&
              !nd_shape_has(&s, ND_PARAM_NORM_Q) && nd_shape_has(&s, ND_PARAM_NORM_Q_ALL));
    refused("olmo2", "'mlp_bias': true", "mlp_bias is true|model_type olmo2");
}

Test(shape, norms_before_and_behind)
{
    nd_shape s = family_of("glm4", "");
    nd_layout *layout = NULL;
    cr_expect(s.post_norm == 2 && s.qkv_bias && !s.o_bias && s.head_dim == 128 && s.rotated == 64 &&
              s.eos_id == 151329 && s.rms_eps == 1.5625e-7);
    assert_ok(nd_layout_create(&(nd_layout_options){.shape = &s}, &layout));
    const struct {
        nd_param_id id;
        const char *name;
    } names[] = {{ND_PARAM_NORM_1, "model.layers.1.input_layernorm.weight"},
                 {ND_PARAM_POST_1, "model.layers.1.post_self_attn_layernorm.weight"},
                 {ND_PARAM_NORM_2, "model.layers.1.post_attention_layernorm.weight"},
                 {ND_PARAM_POST_2, "model.layers.1.post_mlp_layernorm.weight"},
                 {ND_PARAM_UP, "model.layers.1.mlp.gate_up_proj.weight"},
                 {ND_PARAM_K, "model.layers.1.self_attn.k_proj.weight"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cr_expect_str_eq(nd_layout_param(layout, names[i].id, 1)->file_name, names[i].name);
    }
    /* Row 129 of k is element 1 of head 1, the first of the second pair; its partner is 32 on. */
    const nd_param *k = nd_layout_param(layout, ND_PARAM_K, 1);
    cr_expect_eq(nd_param_in_file(k, 129 * k->cols + 5), (128 + 2) * k->cols + 5);
    cr_expect_eq(nd_param_in_file(k, (129 + 32) * k->cols), (128 + 3) * k->cols);
    cr_expect_eq(nd_param_in_file(k, (128 + 64) * k->cols), (128 + 64) * k->cols, "not turned");
    cr_expect_eq(nd_param_adjacent(k, 129 * k->cols + 5), k->cols - 5);
    nd_layout_destroy(layout);
    s = family_of("glm4", "'attention_bias': false, 'partial_rotary_factor': 1.0");
    cr_expect(!s.qkv_bias && s.rotated == 0);
    refused("glm4", "'rope_scaling': {'type': 'linear', 'factor': 2}",
            "rope_type is \"linear\"|model_type glm4 only default is");
    refused("glm4", "'rope_scaling': {'type': 'longrope'}", "\"longrope\"|only default is");
}

Test(shape, layers_with_windows_have_their_own_rope)
{
    nd_shape s = family_of("olmo3", "'num_hidden_layers': 4");
    cr_expect(s.qk_norm == 2 && s.post_norm == 1 && s.window == 4096 && s.rope.theta == 5e5 &&
              s.window_theta == 5e5);
    expect_written(&s, "^  \"rope_theta\": 500000.0,"); /* of all layers, in all releases */
    cr_expect(nd_shape_window(&s, 2, 9000) == 4096 && nd_shape_window(&s, 3, 9000) == 0);
    s = family_of(
        "olmo3",
        "'rope_parameters': {'full_attention': {'rope_type': 'linear', 'factor': 8, 'rope_theta': "
        "1e6}, 'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4}}");
    cr_expect(s.rope.type == ND_ROPE_LINEAR && s.rope.factor == 8 && s.rope.theta == 1e6 &&
              s.window_theta == 1e4);
    s = family_of("olmo3", "'rope_theta': 500000, 'rope_scaling': {'rope_type': 'linear', "
                           "'factor': 2}, 'layer_types': ['full_attention', 'full_attention']");
    cr_expect(s.rope.factor == 2 && s.window == 0 && s.window_theta == 0);
    refused("olmo3", "'rope_theta': 1e4", "rope_theta is 10000|sliding_attention");
    refused("olmo3", "'rope_parameters': {'rope_theta': 1e4}",
            "model_type olmo3 rope_parameters must be|sliding_attention");
    refused("olmo3", "'rope_parameters': {'chunked_attention': {}}", "and nothing else");
    refused("olmo3", "'rope_parameters': 3", "rope_parameters is an integer|a map");
    refused("olmo3", "'rope_parameters': {'sliding_attention': {'rope_type': 'yarn'}}",
            "sliding_attention: rope_type is \"yarn\"|\"default\"");
    refused("olmo3", "'rope_parameters': {'sliding_attention': {'factor': 2}}",
            "the key factor|sliding_attention");
    refused("olmo3", "'sliding_window': null", "sliding_window is null|2 layers");
    refused("llama", "'rope_parameters': {'full_attention': {'rope_theta': 1e4}}",
            "full_attention is not supported|model_type llama");
}

static void expect_gemma3(const char *keys)
{
    nd_shape s = family_of("gemma3_text", keys);
    nd_layout *layout = NULL;
    cr_expect(s.tied && s.qk_norm == 1 && s.post_norm == 2 && s.head_dim == 256 && s.eos_id == 1);
    cr_expect(s.rope.type == ND_ROPE_LINEAR && s.rope.factor == 8 && s.rope.theta == 1e6 &&
              s.window_theta == 1e4);
    cr_expect(nd_shape_window(&s, 0, 9000) == 512 && nd_shape_window(&s, 1, 9000) == 0);
    cr_expect_eq(s.attention_scale, 1 / sqrt(168));
    cr_expect_eq(nd_shape_lookup_scale(&s), 8);
    expect_written(&s, "^  \"rope_local_base_freq\": 10000.0,"); /* which all releases read */
    expect_written(&s, "^  \"rope_scaling\": {");
    assert_ok(nd_layout_create(&(nd_layout_options){.shape = &s}, &layout));
    const nd_param *norm = nd_layout_param(layout, ND_PARAM_NORM_2, 1);
    cr_expect_str_eq(norm->name, "model.layers.1.pre_feedforward_layernorm.weight");
    cr_expect_eq(norm->init, ND_INIT_ZERO, "1 is added to it");
    nd_layout_destroy(layout);
}

Test(shape, gemma3)
{
    expect_gemma3("'rope_theta': 1000000, 'rope_local_base_freq': 10000, 'rope_scaling': "
                  "{'factor': 8.0, 'rope_type': 'linear'}, 'query_pre_attn_scalar': 168, "
                  "'sliding_window': 512, 'sliding_window_pattern': 2, 'attn_logit_softcapping': "
                  "null, 'hidden_activation': 'gelu_pytorch_tanh'");
    expect_gemma3("'rope_parameters': {'full_attention': {'rope_type': 'linear', 'factor': 8.0, "
                  "'rope_theta': 1e6}, 'sliding_attention': {'rope_type': 'default', 'rope_theta': "
                  "1e4}}, 'query_pre_attn_scalar': 168, 'sliding_window': 512, 'layer_types': "
                  "['sliding_attention', 'full_attention'], 'use_bidirectional_attention': false");
    nd_shape s = family_of("gemma3_text", "");
    cr_expect(s.window == 4096 && s.full.bits[0] == 0 && s.attention_scale == 1 / 16.0 &&
              s.rope.theta == 1e6 && s.window_theta == 1e4);
    s = family_of("gemma3_text", "'num_hidden_layers': 6");
    cr_expect_eq(s.full.bits[0], 0x20);
    s = family_of("gemma3_text", "'rope_theta': 5e5, 'rope_local_base_freq': 2e4");
    cr_expect(s.rope.theta == 5e5 && s.window_theta == 2e4);
    refused("gemma3_text", "'final_logit_softcapping': 30.0",
            "final_logit_softcapping is set|not capped");
    refused("gemma3_text", "'use_bidirectional_attention': true",
            "use_bidirectional_attention is true|model_type gemma3_text only false");
    refused("gemma3_text", "'hidden_activation': 'silu'",
            "hidden_activation is \"silu\"|only \"gelu_pytorch_tanh\" is supported");
}

Test(shape, layers_without_windows_have_no_rope)
{
    nd_shape s = family_of("exaone4", "'sliding_window_pattern': 2");
    cr_expect(s.qk_norm == 1 && s.post_norm == 1 && s.eos_id == 2 && s.window == 4096);
    cr_expect(nd_shape_window(&s, 0, 9000) == 4096 && nd_shape_turns(&s, 0));
    cr_expect(nd_shape_window(&s, 1, 9000) == 0 && !nd_shape_turns(&s, 1));
    s = family_of("exaone4", "");
    cr_expect(s.full.bits[0] == 0 && s.unturned.bits[0] == 0, "each fourth of two layers");
    s = family_of("exaone4", "'num_hidden_layers': 4");
    cr_expect(s.full.bits[0] == 8 && s.unturned.bits[0] == 8);
    s = family_of("exaone4",
                  "'sliding_window': null, 'layer_types': ['full_attention', 'full_attention']");
    cr_expect(s.window == 0 && nd_shape_turns(&s, 0) && nd_shape_turns(&s, 1));
    s = family_of("exaone4",
                  "'sliding_window': 7, 'layer_types': ['full_attention', 'full_attention']");
    cr_expect(nd_shape_window(&s, 1, 99) == 0 && !nd_shape_turns(&s, 1), "as transformers has it");
    refused("exaone4", "'sliding_window_pattern': 'LG'",
            "sliding_window_pattern is \"LG\"|write layer_types");
    refused("exaone4", "'sliding_window_pattern': 0", "sliding_window_pattern is 0|1 to 4096");
}

Test(shape, multipliers)
{
    nd_shape s = family_of("granite", "'embedding_multiplier': 12, 'residual_multiplier': 0.22, "
                                      "'attention_multiplier': 0.015625, 'logits_scaling': 8.0");
    cr_expect(s.embedding_scale == 12 && s.residual_scale == 0.22 &&
              s.attention_scale == 0.015625 && s.logits_divisor == 8);
    s = family_of("granite", "");
    cr_expect(s.attention_scale == 1 && s.residual_scale == 1, "not head_dim^-0.5");
    refused("granite", "'residual_multiplier': 0",
            "residual_multiplier is 0|supported are 1e-06 to");
    refused("llama", "'logits_scaling': 8", "logits_scaling is 8|model_type llama only 1");
}

/* An absent key stands for the number of the family's class, null for what follows from others. */
Test(shape, absent_is_not_null)
{
    refused(NULL,
            "{'model_type': 'mistral', 'vocab_size': 100, 'hidden_size': 64, 'intermediate_size': "
            "96, 'num_hidden_layers': 2, 'num_attention_heads': 4}",
            "num_attention_heads 4|num_key_value_heads 8");
    nd_shape s = family_of("mistral", "'num_key_value_heads': null");
    cr_expect_eq(s.kv_heads, 4);
    s = family_of("qwen3", "'head_dim': null");
    cr_expect_eq(s.head_dim, 16);
    s = family_of("phi3", "");
    cr_expect_eq(s.rms_eps, 1e-5);
    s = family_of("mistral", "");
    cr_expect_eq(s.rms_eps, 1e-6);
}

/* 30 / 44 of 44 is below 30 in F64. */
Test(shape, a_rotated_part_reads_back)
{
    const nd_shape s = family_of("phi3", "'head_dim': 44, 'partial_rotary_factor': 0.682");
    cr_expect_eq(s.rotated, 30);
}

Test(shape, parameters)
{
    nd_shape s = parsed("llama", "'num_key_value_heads': 2");
    /* embedding 6400, head 6400, final norm 64; a block: q, o 4096 each, k, v 2048 each, MLP 3 x
     * 6144, norms 128 */
    cr_expect_eq(nd_shape_parameters(&s),
                 6400 + 6400 + 64 + 2 * (2 * 4096 + 2 * 2048 + 3 * 6144 + 128));
    s.tied = true;
    cr_expect_eq(nd_shape_parameters(&s), 6400 + 64 + 2 * (2 * 4096 + 2 * 2048 + 3 * 6144 + 128));
}

static void expect_misfit(const nd_shape *s, nd_mesh mesh, int64_t sequence, const char *words)
{
    expect_sentence(nd_shape_check_mesh(s, &mesh, 1, sequence), ND_ERR_CONFIG, words);
}

static void expect_fit(const nd_shape *s, nd_mesh mesh, int64_t sequence)
{
    assert_ok(nd_shape_check_mesh(s, &mesh, 1, sequence));
}

Test(shape, mesh_must_divide)
{
    nd_shape s = parsed("llama", "'num_key_value_heads': 2"), six = s;
    expect_fit(&s, (nd_mesh){{1, 3, 5, 2, 2}}, 16);
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 1, 3}}, 12, "num_attention_heads is 4|mesh.tp 3");
    expect_fit(&s, (nd_mesh){{1, 1, 1, 1, 4}}, 16);
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 4, 1}}, 17,
                  "train.sequence_length 17|2 x mesh.cp = 8|take a length such as 24");
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 1, 2}}, 15,
                  "= 15 local tokens|mesh.tp 2; take a length such as 16");
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 3, 4}}, 7,
                  "train.sequence_length 7|take a length such as 12");
    assert_ok(nd_shape_check_mesh(&s, &(nd_mesh){{1, 1, 1, 1, 2}}, 2, 15)); /* 30 tokens */
    expect_fit(&s, (nd_mesh){{1, 1, 1, 4, 1}, 4}, 16);
    expect_misfit(
        &s, (nd_mesh){{1, 1, 1, 8, 1}, 8}, 16,
        "num_attention_heads 4 / mesh.tp 1 = 4 heads|8 ranks|give --ulysses 2 or 4 and --cp-comm");
    expect_misfit(
        &s, (nd_mesh){{1, 1, 1, 3, 1}, 3}, 12,
        "4 heads|3 ranks|with mesh.cp 3 no --ulysses above 1 is possible, so leave it out");
    six.heads = 24, six.kv_heads = 6;
    expect_misfit(&six, (nd_mesh){{1, 1, 1, 4, 1}, 4}, 16,
                  "6 of num_key_value_heads 6, which neither divide 4 ranks|give --ulysses 2 and");
    s.ffn = 98;
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 1, 4}}, 16,
                  "intermediate_size is 98|mesh.tp 4|give --tp-size 1 or 2");
    s.heads = 12, s.kv_heads = 4, s.ffn = 96;
    expect_fit(&s, (nd_mesh){{1, 1, 1, 1, 6}}, 24);
    expect_misfit(&s, (nd_mesh){{1, 1, 1, 1, 5}}, 24,
                  "num_attention_heads is 12|--tp-size 1, 2, 3, 4, 6 or 12");
}
