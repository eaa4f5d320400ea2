// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/shape.h"

static nd_status check_divides(const char *what, int64_t extent, const char *axis, int size)
{
    if (extent % size == 0) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s %lld is not divisible by %s %d; choose a divisor of it as the axis", what,
                   (long long)extent, axis, size);
}

nd_status nd_llama_shape_check_mesh(const nd_llama_shape *shape, const nd_mesh *mesh,
                                    int64_t micro_batch, int64_t sequence)
{
    int tp = mesh->size[ND_AXIS_TP], cp = mesh->size[ND_AXIS_CP];
    ND_TRY(check_divides("the model's num_attention_heads", shape->heads, "mesh.tp", tp));
    ND_TRY(check_divides("the model's num_key_value_heads", shape->kv_heads, "mesh.tp", tp));
    ND_TRY(check_divides("the model's intermediate_size", shape->ffn, "mesh.tp", tp));
    if (shape->head_dim % 2 != 0) {
        return nd_fail(ND_ERR_CONFIG, "the model's head_dim %lld is odd; RoPE needs an even one",
                       (long long)shape->head_dim);
    }
    if (cp > 1 && sequence % (2 * (int64_t)cp) != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.sequence_length %lld is not divisible by 2 x mesh.cp = %lld; context "
                       "parallelism gives each rank two chunks, so take a length such as %lld",
                       (long long)sequence, 2 * (long long)cp,
                       (long long)(sequence / (2 * cp) + 1) * 2 * cp);
    }
    int64_t tokens = micro_batch * (sequence / cp);
    if (tokens % tp != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.micro_batch_size %lld x train.sequence_length %lld / mesh.cp %d = %lld "
            "local tokens are not divisible by mesh.tp %d",
            (long long)micro_batch, (long long)sequence, cp, (long long)tokens, tp);
    }
    return ND_OK;
}

int64_t nd_llama_shape_parameters(const nd_llama_shape *s)
{
    int64_t attention = s->hidden * s->head_dim * (2 * s->heads + 2 * s->kv_heads);
    int64_t block = attention + 3 * s->hidden * s->ffn + 2 * s->hidden;
    return s->vocab * s->hidden * (s->tied ? 1 : 2) + s->layers * block + s->hidden;
}
