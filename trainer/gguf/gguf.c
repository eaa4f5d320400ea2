// SPDX-License-Identifier: Apache-2.0
#include "trainer/gguf/gguf.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/rope.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/math.h"
#include "trainer/corpus/chat.h"
#include "trainer/text/parts.h"

enum { VERSION = 3, ALIGNMENT = 32, KEY_COUNT_AT = 16, BLOCK = 32 };
enum { PIECE = 1 << 18 }; /* values that are read and stored at a time: whole blocks */

/* Kinds of values (gguf_type), and of tokens (llama_token_type). */
enum { U32 = 4, I32 = 5, F32 = 6, FLAG = 7, TEXT = 8, ARRAY = 9 };
enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };

/* A file that is being written. A failure shows in ferror(out). */
typedef struct file {
    FILE *out;
    const char *path, *folder; /* folder: of the model and its tokenizer */
    nd_gguf_type type;
    const nd_hf_reader *reader;
    const nd_shape *shape;
    nd_layout *layout;
    nd_tokenizer *tokenizer;
    json_t *json;         /* tokenizer.json */
    json_t *config;       /* tokenizer_config.json; NULL: there is none */
    uint64_t keys, bytes; /* listed: keys, and values of tensors */
    float *values;        /* [PIECE] */
    uint8_t *stored;      /* [4 PIECE] */
} file;

/* llama.cpp's names for the families that it computes as they are here. */
static const char *const families[ND_FAMILY_COUNT] = {
    [ND_FAMILY_LLAMA] = "llama", [ND_FAMILY_QWEN2] = "qwen2", [ND_FAMILY_QWEN3] = "qwen3"};

/* Of all parameters that these families have. */
static const char *const names[ND_PARAM_COUNT] = {
    [ND_PARAM_EMBED] = "token_embd.weight",
    [ND_PARAM_NORM_1] = "blk.%lld.attn_norm.weight",
    [ND_PARAM_Q] = "blk.%lld.attn_q.weight",
    [ND_PARAM_K] = "blk.%lld.attn_k.weight",
    [ND_PARAM_V] = "blk.%lld.attn_v.weight",
    [ND_PARAM_O] = "blk.%lld.attn_output.weight",
    [ND_PARAM_NORM_2] = "blk.%lld.ffn_norm.weight",
    [ND_PARAM_GATE] = "blk.%lld.ffn_gate.weight",
    [ND_PARAM_UP] = "blk.%lld.ffn_up.weight",
    [ND_PARAM_DOWN] = "blk.%lld.ffn_down.weight",
    [ND_PARAM_NORM_F] = "output_norm.weight",
    [ND_PARAM_HEAD] = "output.weight",
    [ND_PARAM_Q_BIAS] = "blk.%lld.attn_q.bias",
    [ND_PARAM_K_BIAS] = "blk.%lld.attn_k.bias",
    [ND_PARAM_V_BIAS] = "blk.%lld.attn_v.bias",
    [ND_PARAM_O_BIAS] = "blk.%lld.attn_output.bias",
    [ND_PARAM_GATE_BIAS] = "blk.%lld.ffn_gate.bias",
    [ND_PARAM_UP_BIAS] = "blk.%lld.ffn_up.bias",
    [ND_PARAM_DOWN_BIAS] = "blk.%lld.ffn_down.bias",
    [ND_PARAM_NORM_Q] = "blk.%lld.attn_q_norm.weight",
    [ND_PARAM_NORM_K] = "blk.%lld.attn_k_norm.weight",
};

static nd_status check_family(const nd_shape *s)
{
    const nd_rope_type rope = s->rope.type;
    const bool llama = s->family == ND_FAMILY_LLAMA;
    const char *why =
        !families[s->family] ? "only llama, qwen2 and qwen3 can"
        : s->window > 0 || rope == ND_ROPE_DYNAMIC || rope == ND_ROPE_YARN ||
                rope == ND_ROPE_LONGROPE
            ? "it has a sliding window, or the rope_type dynamic, yarn or longrope"
        : s->o_bias && !llama
            ? "all linears of its attention have biases, and llama.cpp does not load it"
        : rope == ND_ROPE_LLAMA3 && !llama ? "llama.cpp has no rope_type llama3 for it"
                                           : NULL;
    return why ? nd_fail(ND_ERR_DATA, "a model of the type \"%s\" cannot be written as GGUF: %s",
                         nd_families[s->family].model_type, why)
               : ND_OK;
}

/* Storing a block of values, of one but for Q8_0. False: F16 cannot hold a value, or the scale. */

static bool store_f32(const float *value, uint8_t *out)
{
    memcpy(out, value, sizeof *value);
    return true;
}

static bool store_bf16(const float *value, uint8_t *out)
{
    const nd_bf16 code = nd_bf16_from_f32(*value);
    memcpy(out, &code, sizeof code);
    return true;
}

/* The nearest, ties to even. */
static bool store_f16(const float *value, uint8_t *out)
{
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    const uint32_t code = magnitude < 0x38800000 /* below 2^-14: a multiple of 2^-24 */
                              ? (uint32_t)lrintf(fabsf(*value) * 0x1p24f)
                              : (rounded >> 13) - (112 << 10);
    const uint16_t f16 = (uint16_t)((bits >> 16 & 0x8000) | code);
    memcpy(out, &f16, sizeof f16);
    return rounded < 0x47800000;
}

/* The scale is the greatest magnitude / 127; quotients are rounded to the nearest, halves away from
 * zero. */
static bool store_q8_0(const float *values, uint8_t *out)
{
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        if (!isfinite(values[i])) {
            return false;
        }
        largest = fmaxf(largest, fabsf(values[i]));
    }
    const float scale = largest / 127, factor = scale >= FLT_MIN ? 1 / scale : 0;
    for (int i = 0; i < BLOCK; i++) {
        out[2 + i] = (uint8_t)(int8_t)roundf(values[i] * factor);
    }
    return store_f16(&scale, out);
}

static const struct {
    int block, bytes;      /* values of a block, and what they take */
    int number, file_type; /* llama.cpp's ggml_type and llama_ftype */
    bool (*store)(const float *values, uint8_t *out);
} kinds[] = {[ND_GGUF_F32] = {1, 4, 0, 0, store_f32},
             [ND_GGUF_F16] = {1, 2, 1, 1, store_f16},
             [ND_GGUF_BF16] = {1, 2, 30, 32, store_bf16},
             [ND_GGUF_Q8_0] = {BLOCK, 2 + BLOCK, 8, 7, store_q8_0}};

/* Parts of the file. */

static void put(file *f, uint64_t number, size_t bytes)
{
    fwrite(&number, bytes, 1, f->out);
}

static void put_text(file *f, const char *text, size_t size)
{
    put(f, size, 8);
    fwrite(text, 1, size, f->out);
}

static void begin_key(file *f, const char *key, int kind)
{
    const char *family = *key == '.' ? families[f->shape->family] : "";
    put(f, strlen(family) + strlen(key), 8);
    fprintf(f->out, "%s%s", family, key);
    put(f, (uint64_t)kind, 4);
    f->keys++;
}

static void add_text(file *f, const char *key, const char *text)
{
    if (text) {
        begin_key(f, key, TEXT);
        put_text(f, text, strlen(text));
    }
}

/* The caller puts `count` values of the kind behind it. */
static void begin_array(file *f, const char *key, int kind, size_t count)
{
    begin_key(f, key, ARRAY);
    put(f, (uint64_t)kind, 4);
    put(f, count, 8);
}

/* The tokenizer. */

/* llama.cpp's names for the ways to cut a text into words. NULL: it has none for this tokenizer. */
static const char *find_splitting(const nd_tokenizer *t)
{
    static const struct {
        const char *name;
        int count;
        nd_splitter splitters[2];
        bool ignores_merges;
    } ways[] = {{"gpt-2", 1, {ND_SPLIT_GPT2}, false}, /* also of bytes without merges */
                {"llama-bpe", 1, {ND_SPLIT_LLAMA3}, true},
                {"qwen2", 1, {ND_SPLIT_QWEN2}, false},
                {"smollm", 2, {ND_SPLIT_EACH_DIGIT, ND_SPLIT_GPT2}, false}};
    bool known = t->byte_level && !t->prefix_blank && t->metaspace == ND_METASPACE_NONE;
    for (int i = 0; i < t->rewrite_count; i++) {
        known &= t->rewrites[i].compose;
    }
    for (int i = 0; i < t->added_count; i++) {
        known &= !t->added[i].single_word && !t->added[i].lstrip && !t->added[i].rstrip;
    }
    for (size_t i = 0; known && i < sizeof ways / sizeof *ways; i++) {
        if (!t->merges.any ||
            (t->splitter_count == ways[i].count && t->bpe.ignore_merges == ways[i].ignores_merges &&
             t->splitters[0] == ways[i].splitters[0] && t->splitters[1] == ways[i].splitters[1])) {
            return ways[i].name;
        }
    }
    return NULL;
}

/* The id of a token that tokenizer_config.json names; -1: none. */
static int32_t named_token(const file *f, const char *key)
{
    const char *name = nd_tokenizer_config_token(f->config, key);
    return name ? nd_tokenizer_find(f->tokenizer, name, strlen(name)) : -1;
}

/* What the tokenizer adds to texts counts, whatever config.json says. -1: nothing is named. */
static int64_t end_of_text(const file *f)
{
    return f->tokenizer->behind_count > 0 ? f->tokenizer->behind[0]
           : f->shape->eos_id >= 0        ? f->shape->eos_id
                                          : named_token(f, "eos_token");
}

static nd_status open_tokenizer(file *f)
{
    char *path = NULL;
    ND_TRY(nd_json_read(f->folder, "tokenizer.json", 0, &f->json));
    if (!f->json) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has no tokenizer.json, and a GGUF file holds the tokenizer too; "
                       "copy the model's tokenizer.json there",
                       f->folder);
    }
    ND_TRY(nd_fs_format(&path, "%s/tokenizer.json", f->folder));
    const nd_status status = nd_tokenizer_open(path, &f->tokenizer);
    free(path);
    ND_TRY(status);
    ND_TRY(nd_tokenizer_config_read(f->folder, &f->config));
    const nd_tokenizer *t = f->tokenizer;
    if (nd_tokenizer_vocab_size(t) > f->shape->vocab) {
        return nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" has %d ids, and the model has %lld",
                       f->folder, (int)nd_tokenizer_vocab_size(t), (long long)f->shape->vocab);
    }
    const char *why =
        !find_splitting(t)
            ? "is none of the forms of GPT-2, Llama 3, Qwen 2 and SmolLM, which are written, or "
              "has "
              "added tokens with single_word, lstrip or rstrip; convert_hf_to_gguf.py of llama.cpp "
              "reads this folder"
        : t->before_count > 1 || t->behind_count > 1
            ? "adds several tokens before or behind a text; a GGUF file can name one"
        : end_of_text(f) < 0 ? "names no end of text, and llama.cpp would take another token for "
                               "it; write eos_token_id in config.json (for bytes one that no text "
                               "holds, such as 0), and remove SHA256SUMS, which lists that file "
                               "as it was"
                             : NULL;
    return why ? nd_fail(ND_ERR_DATA, "the tokenizer of \"%s\" %s", f->folder, why) : ND_OK;
}

/* Keys with values, behind three numbers of the file. */

static void add_numbers(file *f)
{
    const nd_shape *s = f->shape;
    const nd_tokenizer *t = f->tokenizer;
    const struct {
        const char *key;
        int kind;
        double value; /* below 0: there is none */
    } numbers[] = {
        {"general.quantization_version", U32, 2},
        {"general.file_type", U32, kinds[f->type].file_type},
        {".vocab_size", U32, (double)s->vocab},
        {".context_length", U32, (double)s->max_positions},
        {".embedding_length", U32, (double)s->hidden},
        {".block_count", U32, (double)s->layers},
        {".feed_forward_length", U32, (double)s->ffn},
        {".attention.head_count", U32, (double)s->heads},
        {".attention.head_count_kv", U32, (double)s->kv_heads},
        {".attention.key_length", U32, (double)s->head_dim},
        {".attention.value_length", U32, (double)s->head_dim},
        {".attention.layer_norm_rms_epsilon", F32, s->rms_eps},
        {".rope.dimension_count", U32, (double)s->head_dim},
        {".rope.freq_base", F32, s->rope.theta},
        {".rope.scaling.factor", F32, s->rope.type == ND_ROPE_LINEAR ? s->rope.factor : -1},
        {"tokenizer.ggml.bos_token_id", U32,
         (double)(t->before_count > 0 ? t->before[0] : s->bos_id)},
        {"tokenizer.ggml.eos_token_id", U32, (double)end_of_text(f)},
        {"tokenizer.ggml.padding_token_id", U32, named_token(f, "pad_token")},
        {"tokenizer.ggml.eot_token_id", U32, named_token(f, "eos_token")},
        {"tokenizer.ggml.add_bos_token", FLAG, t->before_count > 0},
        {"tokenizer.ggml.add_eos_token", FLAG, t->behind_count > 0}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const float f32 = (float)numbers[i].value;
        if (numbers[i].value < 0) {
            continue;
        }
        begin_key(f, numbers[i].key, numbers[i].kind);
        if (numbers[i].kind == F32) {
            fwrite(&f32, sizeof f32, 1, f->out);
        } else {
            put(f, (uint64_t)numbers[i].value, numbers[i].kind == FLAG ? 1 : 4);
        }
    }
}

static int kind_of(const nd_tokenizer *t, int32_t id)
{
    for (int i = 0; i < t->added_count; i++) {
        if (t->added[i].id == id) {
            return t->added[i].special ? CONTROL : USER_DEFINED;
        }
    }
    return nd_tokenizer_token(t, id, &(size_t){0}) ? NORMAL : UNUSED;
}

static void add_vocabulary(file *f)
{
    const int32_t count = (int32_t)f->shape->vocab;
    begin_array(f, "tokenizer.ggml.tokens", TEXT, (size_t)count);
    for (int32_t id = 0; id < count; id++) {
        char unused[32];
        size_t size;
        const char *text = nd_tokenizer_token(f->tokenizer, id, &size);
        const int n = snprintf(unused, sizeof unused, "[PAD%d]", (int)id);
        put_text(f, text ? text : unused, text ? size : (size_t)n);
    }
    begin_array(f, "tokenizer.ggml.token_type", I32, (size_t)count);
    for (int32_t id = 0; id < count; id++) {
        put(f, (uint64_t)kind_of(f->tokenizer, id), 4);
    }
}

/* They stand in the file as "a b" or as ["a", "b"]. */
static void add_merges(file *f)
{
    const json_t *merges = json_object_get(json_object_get(f->json, "model"), "merges"), *one;
    size_t i;
    begin_array(f, "tokenizer.ggml.merges", TEXT, json_array_size(merges));
    json_array_foreach(merges, i, one)
    {
        const char *left = json_string_value(json_array_get(one, 0));
        const char *right = json_string_value(json_array_get(one, 1));
        if (left && right) {
            put(f, strlen(left) + 1 + strlen(right), 8);
            fprintf(f->out, "%s %s", left, right);
        } else {
            put_text(f, json_string_value(one), json_string_length(one));
        }
    }
}

static nd_status add_keys(file *f)
{
    const char *slash = strrchr(f->folder, '/');
    char *template = NULL;
    ND_TRY(open_tokenizer(f));
    ND_TRY(nd_chat_template_read(f->folder, &template));
    add_text(f, "general.architecture", families[f->shape->family]);
    add_text(f, "general.name", slash && slash[1] ? slash + 1 : f->folder);
    add_text(f, ".rope.scaling.type", f->shape->rope.type == ND_ROPE_LINEAR ? "linear" : NULL);
    add_text(f, "tokenizer.ggml.model", "gpt2");
    add_text(f, "tokenizer.ggml.pre", find_splitting(f->tokenizer));
    add_text(f, "tokenizer.chat_template", template);
    free(template);
    add_numbers(f);
    add_vocabulary(f);
    add_merges(f);
    return ND_OK;
}

/* Tensors: the parameters in the order of the layout, behind the factors of RoPE where the type is
 * llama3. */

static const char factors[] = "rope_freqs.weight";

static bool has_factors(const file *f)
{
    return f->shape->rope.type == ND_ROPE_LLAMA3;
}

static nd_gguf_type type_of(const file *f, const nd_param *p)
{
    return p->axes == 1 ? ND_GGUF_F32 : p->cols % kinds[f->type].block != 0 ? ND_GGUF_F16 : f->type;
}

/* Lists a tensor of rows x cols, or a vector of `rows`. */
static void list_tensor(file *f, const char *name, nd_gguf_type type, int axes, int64_t rows,
                        int64_t cols)
{
    put_text(f, name, strlen(name));
    put(f, (uint64_t)axes, 4); /* then the axis of adjacent elements first */
    put(f, (uint64_t)cols, axes > 1 ? 8 : 0);
    put(f, (uint64_t)rows, 8);
    put(f, (uint64_t)kinds[type].number, 4);
    put(f, f->bytes, 8);
    f->bytes +=
        nd_round_up_bytes((size_t)(rows * cols / kinds[type].block * kinds[type].bytes), ALIGNMENT);
}

static void list_tensors(file *f)
{
    if (has_factors(f)) {
        list_tensor(f, factors, ND_GGUF_F32, 1, f->shape->head_dim / 2, 1);
    }
    for (int i = 0; i < f->layout->param_count; i++) {
        const nd_param *p = &f->layout->params[i];
        char name[128];
        ND_ASSERT(names[p->id]);
        snprintf(name, sizeof name, names[p->id], (long long)p->layer);
        list_tensor(f, name, type_of(f, p), p->axes, p->rows, p->cols);
    }
}

/* A write that failed is tried again here, and says why. */
static nd_status check_written(const file *f)
{
    FILE *out = f->out;
    return out && fflush(out) == 0 && !ferror(out)
               ? ND_OK
               : nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", f->path, strerror(errno));
}

/* Of whole blocks. */
static nd_status write_values(file *f, nd_gguf_type type, const char *name, const float *values,
                              int64_t count)
{
    bool held = true;
    uint8_t *to = f->stored;
    for (int64_t i = 0; i < count; i += kinds[type].block, to += kinds[type].bytes) {
        held = kinds[type].store(values + i, to) && held;
    }
    fwrite(f->stored, 1, (size_t)(to - f->stored), f->out);
    return held ? check_written(f)
                : nd_fail(ND_ERR_DATA,
                          "the tensor %s has a value that F16 cannot hold; export it as bf16 or "
                          "f32",
                          name);
}

static void pad(FILE *out)
{
    while (ftello(out) % ALIGNMENT != 0 && fputc(0, out) != EOF) {
    }
}

static nd_status write_factors(file *f)
{
    const nd_shape *s = f->shape;
    const nd_rope_config plain = {.theta = s->rope.theta};
    for (int64_t i = 0; i < s->head_dim / 2; i++) {
        const float factor = (float)(nd_rope_frequency(&plain, s->head_dim, i) /
                                     nd_rope_frequency(&s->rope, s->head_dim, i));
        ND_TRY(write_values(f, ND_GGUF_F32, factors, &factor, 1));
    }
    return ND_OK;
}

/* In its family llama, llama.cpp turns adjacent dimensions 2 i and 2 i + 1 of a head, where Hugging
 * Face's files turn i and head_dim / 2 + i, so the rows of a head change places. */
static nd_status write_tensor(file *f, const nd_param *p)
{
    const int64_t head_dim = f->shape->head_dim, all = p->rows * p->cols;
    const bool turns = f->shape->family == ND_FAMILY_LLAMA &&
                       (p->id == ND_PARAM_Q || p->id == ND_PARAM_K || p->id == ND_PARAM_Q_BIAS ||
                        p->id == ND_PARAM_K_BIAS);
    for (int64_t at = 0, count; at < all; at += count) {
        const int64_t row = at / p->cols, column = at % p->cols, in_head = row % head_dim;
        const int64_t source = row - in_head + in_head % 2 * (head_dim / 2) + in_head / 2;
        count = nd_min(PIECE, turns ? p->cols - column : all - at);
        ND_TRY(nd_hf_reader_read(f->reader, p->name, turns ? source * p->cols + column : at, count,
                                 f->values));
        ND_TRY(write_values(f, type_of(f, p), p->name, f->values, count));
    }
    return ND_OK;
}

/* The file. */

static nd_status write_all(file *f, const char *parent, uint64_t *bytes)
{
    ND_TRY(check_written(f));
    fwrite("GGUF", 1, 4, f->out);
    put(f, VERSION, 4);
    put(f, (uint64_t)f->layout->param_count + has_factors(f), 8);
    put(f, 0, 8); /* the number of keys, when it is known */
    ND_TRY(add_keys(f));
    list_tensors(f);
    pad(f->out);
    ND_TRY(check_written(f));
    ND_TRY(nd_fs_check_space(parent, f->bytes, "the GGUF file"));
    ND_TRY(has_factors(f) ? write_factors(f) : ND_OK);
    for (int i = 0; i < f->layout->param_count; i++) {
        pad(f->out);
        ND_TRY(write_tensor(f, &f->layout->params[i]));
    }
    pad(f->out);
    *bytes = (uint64_t)ftello(f->out);
    fseeko(f->out, KEY_COUNT_AT, SEEK_SET);
    put(f, f->keys, 8);
    return check_written(f);
}

nd_status nd_gguf_export(const nd_hf_reader *model, const char *folder, nd_gguf_type type,
                         const char *path, uint64_t *bytes)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    const nd_shape *shape = nd_hf_reader_shape(model);
    const nd_layout_options options = {.shape = shape, .mesh = &one};
    file f = {.path = path, .folder = folder, .type = type, .reader = model, .shape = shape};
    char *temporary = NULL, *parent = NULL;
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", path);
    }
    ND_TRY(check_family(shape));
    ND_TRY_OUT(nd_layout_create(&options, &f.layout));
    ND_TRY_OUT(ND_ALLOC(PIECE, &f.values));
    ND_TRY_OUT(ND_ALLOC(4 * PIECE, &f.stored));
    ND_TRY_OUT(nd_fs_parent(path, &parent));
    ND_TRY_OUT(nd_fs_temporary(path, &temporary));
    f.out = nd_fs_stream_new(temporary);
    ND_TRY_OUT(write_all(&f, parent, bytes));
    ND_TRY_OUT(nd_fs_sync_file(temporary));
    status = nd_fs_rename(temporary, path);
out:
    if (f.out) {
        fclose(f.out);
    }
    if (status != ND_OK && temporary) {
        nd_fs_remove_tree(temporary);
    }
    free(temporary);
    free(parent);
    free(f.stored);
    free(f.values);
    json_decref(f.json);
    json_decref(f.config);
    nd_tokenizer_close(f.tokenizer);
    nd_layout_destroy(f.layout);
    return status;
}
