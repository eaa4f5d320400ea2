// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/report.h"

double nd_flops_per_token_causal(const nd_shape *shape, int64_t sequence)
{
    double H = (double)shape->heads, D = (double)shape->head_dim, S = (double)sequence;
    double keys = 0; /* of all layers, twice what a token sees on the average */
    /* A tied embedding multiplies each token as the head; an untied one only looks up. */
    double lookups = shape->tied ? 0 : (double)shape->vocab * (double)shape->hidden;
    for (int64_t l = 0; l < shape->layers; l++) {
        double window = (double)nd_shape_window(shape, l, sequence);
        keys += window > 0 ? window * (2 - window / S) : S;
    }
    return 6 * ((double)nd_shape_parameters(shape) - lookups) + 6 * H * D * keys;
}

/*
 * Per layer 18 C F + 12 D (H + K) + 12 H D S: no head, no factor C in the projections, attention
 * counted in full. The formula is that of accelerate's examples, so that figures compare.
 */
double nd_flops_per_token_accelerate(const nd_shape *shape, int64_t sequence)
{
    double C = (double)shape->hidden, F = (double)shape->ffn;
    double H = (double)shape->heads, K = (double)shape->kv_heads;
    double D = (double)(shape->hidden / shape->heads);
    return (double)shape->layers * (18 * C * F + 12 * D * (H + K) + 12 * H * D * (double)sequence);
}

static void add_traffic(const nd_comm *comm, int64_t bytes[ND_TRAFFIC_COUNT])
{
    if (!comm) {
        return;
    }
    nd_group_traffic carries = nd_group_rows[comm->kind].carries;
    for (nd_comm_op op = 0; op < ND_COMM_OP_COUNT; op++) {
        nd_traffic_kind kind = op == ND_COMM_ALL_GATHER       ? carries.all_gather
                               : op == ND_COMM_REDUCE_SCATTER ? carries.reduce_scatter
                                                              : carries.rest;
        bytes[kind] += comm->stats.bytes_sent[op];
    }
}

void nd_traffic_bytes(const nd_groups *groups, int64_t bytes[ND_TRAFFIC_COUNT])
{
    for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
        bytes[k] = 0;
    }
    for (nd_group_kind group = 0; group < ND_GROUP_COUNT; group++) {
        add_traffic(groups->by_kind[group], bytes);
        add_traffic(groups->second[group], bytes);
    }
}

nd_speed nd_speed_of(const nd_report_options *o, double step_seconds)
{
    int64_t sequence = o->config->train.sequence_length;
    double all = step_seconds > 0 ? (double)o->tokens_per_step / step_seconds : 0;
    double each = all / o->world_size;
    return (nd_speed){
        .tokens_per_second = all,
        .tokens_per_second_per_worker = each,
        .tflops_causal = each * nd_flops_per_token_causal(o->shape, sequence) * 1e-12,
        .tflops_accelerate = each * nd_flops_per_token_accelerate(o->shape, sequence) * 1e-12,
    };
}
