// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/rope.h"
#include "runtime/base/fs.h"
#include "runtime/base/math.h"
#include "trainer/gguf/gguf.h"

enum { VERSION = 3, ALIGNMENT = 32, KEY_COUNT_AT = 16 };

/* Values that are read and stored at a time: whole rows of at most this many, or one head. */
enum { PIECE = 1 << 18 };

typedef struct file {
    const char *folder, *path;
    nd_gguf_type type;
    const nd_hf_reader *reader;
    const nd_shape *shape;
    nd_layout *layout;
    char *temporary;
    nd_gguf gguf;
    float *values;
    void *stored;
} file;

/* llama.cpp's names for the families that it computes as they are here. */
static const struct {
    const char *name; /* NULL: not written */
    bool turns;       /* adjacent dimensions of a head, not its halves */
} families[ND_FAMILY_COUNT] = {[ND_FAMILY_LLAMA] = {"llama", true},
                               [ND_FAMILY_QWEN2] = {"qwen2", false},
                               [ND_FAMILY_QWEN3] = {"qwen3", false}};

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
        !families[s->family].name ? "only llama, qwen2 and qwen3 can"
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

static nd_status add_keys(file *f)
{
    const nd_shape *s = f->shape;
    nd_gguf *g = &f->gguf;
    const char *slash = strrchr(f->folder, '/');
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{"general.quantization_version", 2},
                   /* Numbers of llama.cpp's llama_ftype. */
                   {"general.file_type", f->type == ND_GGUF_BF16   ? 32
                                         : f->type == ND_GGUF_Q8_0 ? 7
                                                                   : f->type},
                   {".vocab_size", s->vocab},
                   {".context_length", s->max_positions},
                   {".embedding_length", s->hidden},
                   {".block_count", s->layers},
                   {".feed_forward_length", s->ffn},
                   {".attention.head_count", s->heads},
                   {".attention.head_count_kv", s->kv_heads},
                   {".attention.key_length", s->head_dim},
                   {".attention.value_length", s->head_dim},
                   {".rope.dimension_count", s->head_dim}};
    nd_gguf_text(g, "general.architecture", g->family);
    nd_gguf_text(g, "general.name", slash && slash[1] ? slash + 1 : f->folder);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        nd_gguf_u32(g, numbers[i].key, (uint32_t)numbers[i].value);
    }
    nd_gguf_f32(g, ".attention.layer_norm_rms_epsilon", s->rms_eps);
    nd_gguf_f32(g, ".rope.freq_base", s->rope.theta);
    if (s->rope.type == ND_ROPE_LINEAR) {
        nd_gguf_text(g, ".rope.scaling.type", "linear");
        nd_gguf_f32(g, ".rope.scaling.factor", s->rope.factor);
    }
    return nd_gguf_add_tokens(g, f->folder, s);
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
    return p->axes == 1                                   ? ND_GGUF_F32
           : f->type == ND_GGUF_Q8_0 && p->cols % 32 != 0 ? ND_GGUF_F16
                                                          : f->type;
}

/* Lists a tensor of rows x cols, or a vector of `rows`; *offset: the bytes of all before it. */
static void list_tensor(nd_gguf *g, const char *name, nd_gguf_type type, int axes, int64_t rows,
                        int64_t cols, uint64_t *offset)
{
    nd_gguf_put_text(g, name, strlen(name));
    nd_gguf_put(g, (uint64_t)axes, 4); /* then the axis of adjacent elements first */
    nd_gguf_put(g, (uint64_t)cols, axes > 1 ? 8 : 0);
    nd_gguf_put(g, (uint64_t)rows, 8);
    nd_gguf_put(g, type, 4);
    nd_gguf_put(g, *offset, 8);
    *offset += nd_round_up_bytes((size_t)nd_gguf_bytes(type, rows * cols), ALIGNMENT);
}

/* Returns the bytes of all values. */
static uint64_t list_tensors(file *f)
{
    uint64_t offset = 0;
    if (has_factors(f)) {
        list_tensor(&f->gguf, factors, ND_GGUF_F32, 1, f->shape->head_dim / 2, 1, &offset);
    }
    for (int i = 0; i < f->layout->param_count; i++) {
        const nd_param *p = &f->layout->params[i];
        char name[128];
        ND_ASSERT(names[p->id]);
        snprintf(name, sizeof name, names[p->id], (long long)p->layer);
        list_tensor(&f->gguf, name, type_of(f, p), p->axes, p->rows, p->cols, &offset);
    }
    return offset;
}

static nd_status fail_write(const file *f)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", f->path, strerror(errno));
}

/* An earlier write that failed is tried again here, and says why. */
static nd_status check_written(const file *f)
{
    errno = EIO;
    const bool failed = fflush(f->gguf.out) != 0 || ferror(f->gguf.out);
    return failed ? fail_write(f) : ND_OK;
}

static nd_status write_values(file *f, nd_gguf_type type, const char *name, const float *values,
                              int64_t count)
{
    const size_t bytes = (size_t)nd_gguf_bytes(type, count);
    if (!nd_gguf_store(type, values, count, f->stored)) {
        return nd_fail(ND_ERR_DATA,
                       "the tensor %s has a value that F16 cannot hold; export it as bf16 or f32",
                       name);
    }
    return fwrite(f->stored, 1, bytes, f->gguf.out) == bytes ? ND_OK : fail_write(f);
}

static void pad(FILE *out)
{
    while (ftello(out) % ALIGNMENT != 0 && fputc(0, out) != EOF) {
    }
}

static nd_status write_factors(file *f)
{
    const nd_rope_config *rope = &f->shape->rope, plain = {.theta = rope->theta};
    const int64_t pairs = f->shape->head_dim / 2;
    for (int64_t i = 0; i < pairs; i++) {
        f->values[i] = (float)(nd_rope_frequency(&plain, f->shape->head_dim, i) /
                               nd_rope_frequency(rope, f->shape->head_dim, i));
    }
    return write_values(f, ND_GGUF_F32, factors, f->values, pairs);
}

/* llama.cpp turns adjacent dimensions 2 i and 2 i + 1 of a head, where Hugging Face's files turn i
 * and head_dim / 2 + i, so the rows of a head change places. */
static nd_status write_head(file *f, const nd_param *p)
{
    const int64_t half = f->shape->head_dim / 2;
    for (int64_t row = 0; row < 2 * half; row++) {
        const float *values = f->values + (row % 2 * half + row / 2) * p->cols;
        ND_TRY(write_values(f, type_of(f, p), p->name, values, p->cols));
    }
    return ND_OK;
}

static nd_status write_tensor(file *f, const nd_param *p)
{
    const bool turns =
        families[f->shape->family].turns && (p->id == ND_PARAM_Q || p->id == ND_PARAM_K ||
                                             p->id == ND_PARAM_Q_BIAS || p->id == ND_PARAM_K_BIAS);
    const int64_t rows = turns ? f->shape->head_dim : nd_max(PIECE / p->cols, 1);
    for (int64_t row = 0; row < p->rows; row += rows) {
        const int64_t count = nd_min(rows, p->rows - row) * p->cols;
        ND_TRY(nd_hf_reader_read(f->reader, p->name, row * p->cols, count, f->values));
        ND_TRY(turns ? write_head(f, p)
                     : write_values(f, type_of(f, p), p->name, f->values, count));
    }
    return ND_OK;
}

static nd_status write_tensors(file *f)
{
    const nd_shape *s = f->shape;
    const int64_t longest = nd_max(nd_max(s->hidden, s->ffn), s->heads * s->head_dim);
    const int64_t room = nd_max(PIECE, nd_max(s->head_dim * s->hidden, longest));
    ND_TRY(ND_ALLOC(room, &f->values));
    ND_TRY(ND_ALLOC(room * (int64_t)sizeof *f->values, (char **)&f->stored));
    ND_TRY(has_factors(f) ? write_factors(f) : ND_OK);
    for (int i = 0; i < f->layout->param_count; i++) {
        pad(f->gguf.out);
        ND_TRY(write_tensor(f, &f->layout->params[i]));
    }
    pad(f->gguf.out);
    return ND_OK;
}

/* The file. */

static nd_status check_space(const file *f, uint64_t bytes)
{
    char *folder = NULL;
    ND_TRY(nd_fs_parent(f->path, &folder));
    const nd_status status = nd_fs_check_space(folder, bytes, "the GGUF file");
    free(folder);
    return status;
}

static nd_status write_all(file *f, uint64_t *bytes)
{
    nd_gguf *g = &f->gguf;
    fwrite("GGUF", 1, 4, g->out);
    nd_gguf_put(g, VERSION, 4);
    nd_gguf_put(g, (uint64_t)f->layout->param_count + has_factors(f), 8);
    nd_gguf_put(g, 0, 8); /* the number of keys, when it is known */
    ND_TRY(add_keys(f));
    const uint64_t values = list_tensors(f);
    pad(g->out);
    ND_TRY(check_written(f));
    ND_TRY(check_space(f, values));
    ND_TRY(write_tensors(f));
    *bytes = (uint64_t)ftello(g->out);
    fseeko(g->out, KEY_COUNT_AT, SEEK_SET);
    nd_gguf_put(g, g->keys, 8);
    return check_written(f);
}

nd_status nd_gguf_export(const nd_hf_reader *model, const char *folder, nd_gguf_type type,
                         const char *path, uint64_t *bytes)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    file f = {.folder = folder, .path = path, .type = type, .reader = model};
    bool there = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", path);
    }
    f.shape = nd_hf_reader_shape(f.reader);
    ND_TRY_OUT(check_family(f.shape));
    ND_TRY_OUT(nd_layout_create(&(nd_layout_options){.shape = f.shape, .mesh = &one}, &f.layout));
    ND_TRY_OUT(nd_fs_temporary(path, &f.temporary));
    f.gguf =
        (nd_gguf){.out = nd_fs_stream_new(f.temporary), .family = families[f.shape->family].name};
    ND_TRY_OUT(f.gguf.out ? write_all(&f, bytes) : fail_write(&f));
    ND_TRY_OUT(nd_fs_sync_file(f.temporary));
    status = nd_fs_rename(f.temporary, path);
out:
    if (f.gguf.out) {
        fclose(f.gguf.out);
    }
    if (status != ND_OK && f.temporary) {
        nd_fs_remove_tree(f.temporary);
    }
    free(f.values);
    free(f.stored);
    free(f.temporary);
    nd_layout_destroy(f.layout);
    return status;
}
