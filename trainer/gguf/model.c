// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/rope.h"
#include "runtime/base/fs.h"
#include "runtime/base/math.h"
#include "trainer/gguf/gguf.h"
#include "trainer/weights/weights.h"

/* Values that are read, reordered and stored at a time: whole rows of at most this many, or one
 * head. */
enum { PIECE = 1 << 18 };

typedef struct tensor {
    const nd_param *param; /* NULL: the factors of RoPE */
    nd_gguf_type type;
    uint64_t offset;
} tensor;

typedef struct file {
    const char *path;
    nd_hf_reader *reader;
    const nd_shape *shape;
    nd_layout *layout;
    nd_gguf_head head;
    tensor *tensors;
    int count;
    char *temporary;
    int fd;
    uint64_t first; /* byte of the first tensor */
    float *values, *turned;
    void *stored;
} file;

/* llama.cpp's names for the families that it computes as they are here. */
static const struct {
    const char *name; /* NULL: not written */
    bool turns;       /* adjacent dimensions of a head, not its halves */
} families[ND_FAMILY_COUNT] = {[ND_FAMILY_LLAMA] = {"llama", true},
                               [ND_FAMILY_QWEN2] = {"qwen2", false},
                               [ND_FAMILY_QWEN3] = {"qwen3", false}};

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

/* Keys. */

static void add_shape(nd_gguf_head *head, const nd_shape *s)
{
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{".vocab_size", s->vocab},
                   {".context_length", s->max_positions},
                   {".embedding_length", s->hidden},
                   {".block_count", s->layers},
                   {".feed_forward_length", s->ffn},
                   {".attention.head_count", s->heads},
                   {".attention.head_count_kv", s->kv_heads},
                   {".attention.key_length", s->head_dim},
                   {".attention.value_length", s->head_dim},
                   {".rope.dimension_count", s->head_dim}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        nd_gguf_u32(head, numbers[i].key, (uint32_t)numbers[i].value);
    }
    nd_gguf_f32(head, ".attention.layer_norm_rms_epsilon", s->rms_eps);
    nd_gguf_f32(head, ".rope.freq_base", s->rope.theta);
    if (s->rope.type == ND_ROPE_LINEAR) {
        nd_gguf_text(head, ".rope.scaling.type", "linear", 6);
        nd_gguf_f32(head, ".rope.scaling.factor", s->rope.factor);
    }
}

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

static nd_status add_keys(file *f, const char *folder, nd_gguf_type type)
{
    const char *name =
        strrchr(folder, '/') && strrchr(folder, '/')[1] ? strrchr(folder, '/') + 1 : folder;
    const bool quantized = type == ND_GGUF_Q8_0;
    nd_gguf_text(&f->head, "general.architecture", f->head.family, strlen(f->head.family));
    nd_gguf_text(&f->head, "general.type", "model", 5);
    nd_gguf_text(&f->head, "general.name", name, strlen(name));
    /* Numbers of llama.cpp's llama_ftype. */
    nd_gguf_u32(&f->head, "general.file_type",
                type == ND_GGUF_BF16 ? 32
                : quantized          ? 7
                                     : (uint32_t)type);
    if (quantized) {
        nd_gguf_u32(&f->head, "general.quantization_version", 2);
    }
    add_shape(&f->head, f->shape);
    return nd_gguf_add_tokens(&f->head, folder, f->shape);
}

/* List of the tensors. */

static void add_tensor(file *f, const nd_param *param, const char *name, nd_gguf_type type,
                       int64_t rows, int64_t cols)
{
    tensor *t = &f->tensors[f->count++];
    *t = (tensor){.param = param, .type = type};
    nd_gguf_tensor(&f->head, name, type, rows, cols, &t->offset);
}

static nd_status list_tensors(file *f, nd_gguf_type type)
{
    ND_TRY(ND_ALLOC(f->layout->param_count + 1, &f->tensors));
    if (f->shape->rope.type == ND_ROPE_LLAMA3) {
        add_tensor(f, NULL, "rope_freqs.weight", ND_GGUF_F32, 1, f->shape->head_dim / 2);
    }
    for (int i = 0; i < f->layout->param_count; i++) {
        const nd_param *p = &f->layout->params[i];
        const char *form = names[p->id];
        char name[128];
        if (!form) {
            return nd_fail(ND_ERR_DATA, "the tensor %s has no name in a GGUF file of this kind",
                           p->name);
        }
        snprintf(name, sizeof name, form, (long long)p->layer);
        const bool vector = p->axes == 1;
        const nd_gguf_type own = vector                                      ? ND_GGUF_F32
                                 : type == ND_GGUF_Q8_0 && p->cols % 32 != 0 ? ND_GGUF_F16
                                                                             : type;
        add_tensor(f, p, name, own, vector ? 1 : p->rows, vector ? p->rows : p->cols);
    }
    return ND_OK;
}

/* Values. */

/* llama.cpp turns adjacent dimensions 2 i and 2 i + 1 of a head, where Hugging Face's files turn i
 * and head_dim / 2 + i, so the rows of a head change places. */
static void reorder_head(const float *from, float *to, int64_t head_dim, int64_t cols)
{
    for (int64_t row = 0; row < head_dim; row++) {
        const int64_t source = row % 2 * (head_dim / 2) + row / 2;
        memcpy(to + row * cols, from + source * cols, (size_t)cols * sizeof *to);
    }
}

static nd_status write_piece(file *f, const tensor *t, const float *values, int64_t begin,
                             int64_t count)
{
    if (!nd_gguf_store(t->type, values, count, f->stored)) {
        return nd_fail(ND_ERR_DATA,
                       "the tensor %s has a value that F16 cannot hold; export it as bf16 or f32",
                       t->param->name);
    }
    return nd_fs_pwrite(f->fd, f->temporary, f->stored, (size_t)nd_gguf_bytes(t->type, count),
                        (int64_t)(f->first + t->offset) + nd_gguf_bytes(t->type, begin));
}

static nd_status write_factors(file *f, const tensor *t)
{
    const nd_rope_config *rope = &f->shape->rope, plain = {.theta = rope->theta};
    const int64_t pairs = f->shape->head_dim / 2;
    for (int64_t i = 0; i < pairs; i++) {
        f->values[i] = (float)(nd_rope_frequency(&plain, f->shape->head_dim, i) /
                               nd_rope_frequency(rope, f->shape->head_dim, i));
    }
    return write_piece(f, t, f->values, 0, pairs);
}

static nd_status write_tensor(file *f, const tensor *t)
{
    const nd_param *p = t->param;
    if (!p) {
        return write_factors(f, t);
    }
    const bool turns =
        families[f->shape->family].turns && (p->id == ND_PARAM_Q || p->id == ND_PARAM_K ||
                                             p->id == ND_PARAM_Q_BIAS || p->id == ND_PARAM_K_BIAS);
    const int64_t rows = turns ? f->shape->head_dim : nd_max(PIECE / p->cols, 1);
    for (int64_t row = 0; row < p->rows; row += rows) {
        const int64_t count = nd_min(rows, p->rows - row) * p->cols;
        ND_TRY(nd_hf_reader_read(f->reader, p->name, row * p->cols, count, f->values));
        if (turns) {
            reorder_head(f->values, f->turned, f->shape->head_dim, p->cols);
        }
        ND_TRY(write_piece(f, t, turns ? f->turned : f->values, row * p->cols, count));
    }
    return ND_OK;
}

static nd_status write_tensors(file *f)
{
    int64_t room = nd_max(PIECE, f->shape->head_dim * f->shape->hidden);
    for (int i = 0; i < f->layout->param_count; i++) {
        room = nd_max(room, f->layout->params[i].cols);
    }
    ND_TRY(ND_ALLOC(room, &f->values));
    ND_TRY(ND_ALLOC(room, &f->turned));
    ND_TRY(ND_ALLOC(room * (int64_t)sizeof *f->values, (char **)&f->stored));
    for (int i = 0; i < f->count; i++) {
        ND_TRY(write_tensor(f, &f->tensors[i]));
    }
    return ND_OK;
}

/* The file. */

static nd_status check_place(const file *f, uint64_t bytes)
{
    char *parent = NULL;
    bool there = false;
    ND_TRY(nd_fs_exists(f->path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE, "%s exists; remove it, or give another name", f->path);
    }
    ND_TRY(nd_fs_parent(f->path, &parent));
    nd_status status = nd_fs_check_space(parent, bytes, "the GGUF file");
    free(parent);
    return status;
}

static nd_status fail_write(const file *f)
{
    return nd_fail(ND_ERR_CANTCREATE, "cannot write \"%s\": %s", f->path, strerror(errno));
}

static nd_status write_file(file *f, uint64_t *bytes)
{
    char *head = NULL;
    size_t size = 0;
    nd_status status = ND_OK;
    ND_TRY(nd_gguf_head_write(&f->head, &head, &size));
    f->first = size;
    *bytes = size + f->head.data_bytes;
    ND_TRY_OUT(check_place(f, *bytes));
    ND_TRY_OUT(nd_fs_temporary(f->path, &f->temporary));
    f->fd = nd_fs_create(f->temporary, 0666);
    ND_TRY_OUT(f->fd < 0 ? fail_write(f) : ND_OK);
    ND_TRY_OUT(nd_fs_pwrite(f->fd, f->temporary, head, size, 0));
    ND_TRY_OUT(write_tensors(f));
    /* With the padding of the last tensor. */
    ND_TRY_OUT(ftruncate(f->fd, (off_t)*bytes) != 0 ? fail_write(f) : ND_OK);
    status = nd_fs_sync_close(f->fd, f->temporary);
    f->fd = -1;
    ND_TRY_OUT(status);
    status = nd_fs_rename(f->temporary, f->path);
out:
    if (f->fd >= 0) {
        close(f->fd);
    }
    if (status != ND_OK && f->temporary) {
        nd_fs_remove_tree(f->temporary);
    }
    free(head);
    return status;
}

nd_status nd_gguf_export(const char *folder, nd_gguf_type type, const char *path, uint64_t *bytes)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    file f = {.path = path, .fd = -1};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_hf_reader_open(folder, &f.reader));
    ND_TRY_OUT(nd_hf_reader_check(f.reader));
    f.shape = nd_hf_reader_shape(f.reader);
    ND_TRY_OUT(check_family(f.shape));
    ND_TRY_OUT(nd_layout_create(&(nd_layout_options){.shape = f.shape, .mesh = &one}, &f.layout));
    ND_TRY_OUT(nd_gguf_head_init(&f.head, families[f.shape->family].name));
    ND_TRY_OUT(add_keys(&f, folder, type));
    ND_TRY_OUT(list_tensors(&f, type));
    status = write_file(&f, bytes);
out:
    free(f.values);
    free(f.turned);
    free(f.stored);
    free(f.tensors);
    free(f.temporary);
    nd_gguf_head_fini(&f.head);
    nd_layout_destroy(f.layout);
    nd_hf_reader_close(f.reader);
    return status;
}
