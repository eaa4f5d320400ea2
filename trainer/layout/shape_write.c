// SPDX-License-Identifier: Apache-2.0
/* A config.json that transformers reads. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fsio.h"
#include "trainer/layout/shape.h"

static json_t *rope_scaling_of(const nd_rope_config *rope)
{
    if (rope->type == ND_ROPE_LINEAR) {
        return json_pack("{s:s, s:f}", "rope_type", "linear", "factor", rope->factor);
    }
    if (rope->type == ND_ROPE_LLAMA3) {
        return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", rope->factor,
                         "low_freq_factor", rope->low_freq_factor, "high_freq_factor",
                         rope->high_freq_factor, "original_max_position_embeddings",
                         (json_int_t)rope->original_max_positions);
    }
    return json_null();
}

static json_t *token_of(int64_t id)
{
    return id < 0 ? json_null() : json_integer(id);
}

/* 15 digits where they read back as the same numbers (1e-05), else 17. Atomic, like all that a
 * model folder holds. */
static nd_status write_json(const json_t *map, const char *path)
{
    nd_status status = ND_ERR_INTERNAL;
    char *text = NULL;
    json_t *back = NULL;
    for (size_t digits = 15; digits <= 17 && !json_equal(map, back); digits += 2) {
        free(text);
        json_decref(back);
        text = json_dumps(map, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits));
        back = text ? json_loads(text, 0, NULL) : NULL;
    }
    status = text ? nd_fs_write_atomic(path, text, strlen(text))
                  : nd_fail(ND_ERR_INTERNAL, "out of host memory while writing %s", path);
    json_decref(back);
    free(text);
    return status;
}

nd_status nd_llama_shape_write(const nd_llama_shape *s, const char *dtype_name, const char *path)
{
    json_t *map =
        json_pack("{s:[s], s:s, s:s, s:b, s:b, s:f, s:i, s:b}", "architectures", "LlamaForCausalLM",
                  "model_type", "llama", "hidden_act", "silu", "attention_bias", 0, "mlp_bias", 0,
                  "attention_dropout", 0.0, "pretraining_tp", 1, "use_cache", 1);
    int bad = !map;
    const struct {
        const char *key;
        json_t *value; /* stolen */
    } entries[] = {
        {"vocab_size", json_integer(s->vocab)},
        {"hidden_size", json_integer(s->hidden)},
        {"intermediate_size", json_integer(s->ffn)},
        {"num_hidden_layers", json_integer(s->layers)},
        {"num_attention_heads", json_integer(s->heads)},
        {"num_key_value_heads", json_integer(s->kv_heads)},
        {"head_dim", json_integer(s->head_dim)},
        {"max_position_embeddings", json_integer(s->max_positions)},
        {"rms_norm_eps", json_real(s->rms_eps)},
        {"initializer_range", json_real(s->init_std)},
        {"tie_word_embeddings", json_boolean(s->tied)},
        {"rope_theta", json_real(s->rope.theta)},
        {"rope_scaling", rope_scaling_of(&s->rope)},
        {"bos_token_id", token_of(s->bos_id)},
        {"eos_token_id", token_of(s->eos_id)},
        {"torch_dtype", json_string(dtype_name)},
    };
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        bad |= json_object_set_new(map, entries[i].key, entries[i].value) != 0;
    }
    if (bad) {
        json_decref(map);
        return nd_fail(ND_ERR_INTERNAL, "cannot put the model configuration together for %s", path);
    }
    nd_status status = write_json(map, path);
    json_decref(map);
    return status;
}
