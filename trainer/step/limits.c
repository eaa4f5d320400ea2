// SPDX-License-Identifier: Apache-2.0
/* Numbers of a model and a configuration that readers accept, but that ops cannot compute. */
#include "trainer/step/step.h"

/* One number of config.json against one limit of the ops. */
static nd_status check_shape(const char *key, int64_t value, int64_t most, const char *op,
                             const nd_ops *ops)
{
    if (most == 0 || value <= most) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   "the model's %s is %lld, but %s of the backend \"%s\" supports at most %lld; "
                   "use a model with a smaller %s",
                   key, (long long)value, op, ops->name, (long long)most, key);
}

/* F64, since the question is whether integers would overflow. */
static double activation_bytes(const nd_shape *s, const nd_mesh *mesh, double tokens)
{
    double tp = mesh->size[ND_AXIS_TP], C = (double)s->hidden, F = (double)s->ffn;
    double kv_heads = tp * (double)nd_shape_local_kv_heads(s, mesh->size[ND_AXIS_TP]);
    double heads = ((double)s->heads + kv_heads) * (double)s->head_dim;
    double token = 6.0 * C + (2.0 * heads + 4.0 * F) / tp;
    return (double)s->layers * tokens * token * 4.0;
}

nd_status nd_trainer_check_shape(const nd_ops *ops, const nd_shape *shape)
{
    ND_TRY(check_shape("hidden_size", shape->hidden, ops->limits.hidden, "rmsnorm", ops));
    return check_shape("head_dim", shape->head_dim, ops->limits.head_dim, "attention", ops);
}

nd_status nd_trainer_check_limits(const nd_ops *ops, const nd_config *config, const nd_mesh *mesh,
                                  const nd_shape *shape)
{
    const nd_op_limits *most = &ops->limits;
    int64_t batch = config->train.micro_batch_size, sequence = config->train.sequence_length;
    int cp = mesh->size[ND_AXIS_CP];
    int64_t tokens = batch * (sequence / cp);
    ND_TRY(nd_trainer_check_shape(ops, shape));
    if (most->tokens > 0 && tokens > most->tokens) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.micro_batch_size %lld x train.sequence_length %lld / mesh.cp %d = "
                       "%lld tokens of a worker, but the backend \"%s\" supports at most %lld; use "
                       "a smaller micro-batch and more gradient_accumulation_steps, or a shorter "
                       "sequence",
                       (long long)batch, (long long)sequence, cp, (long long)tokens, ops->name,
                       (long long)most->tokens);
    }
    double bytes = activation_bytes(shape, mesh, (double)tokens);
    if (bytes > ND_PLAN_BYTES_MAX) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%lld layers of %lld tokens (train.micro_batch_size %lld x "
                       "train.sequence_length %lld / mesh.cp %d) have activations of %.3g GiB a "
                       "worker, but no host can address more than %.3g; use a smaller model, a "
                       "shorter sequence or a smaller micro-batch",
                       (long long)shape->layers, (long long)tokens, (long long)batch,
                       (long long)sequence, cp, bytes * 0x1p-30, ND_PLAN_BYTES_MAX * 0x1p-30);
    }
    return ND_OK;
}
