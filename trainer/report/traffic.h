// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_TRAFFIC_H
#define ND_REPORT_TRAFFIC_H
/* What this rank put on the wire, by what it was for. */
#include "runtime/comm/comm.h"

typedef enum nd_traffic_kind {
    ND_TRAFFIC_WEIGHTS = 0, /* gathered over dp_shard_cp: 1 byte an FP8 element, 2 a BF16 element */
    ND_TRAFFIC_GRADIENTS,   /* reduced over dp_shard_cp and dp_replicate: F32 */
    ND_TRAFFIC_ACTIVATIONS, /* gathered and reduce-scattered over tp */
    ND_TRAFFIC_KEYS_VALUES, /* over cp */
    ND_TRAFFIC_OTHER,       /* loss, norms, amaxes */
    ND_TRAFFIC_COUNT
} nd_traffic_kind;

const char *nd_traffic_name(nd_traffic_kind kind); /* "weights" */

/* Bytes since the groups were made. */
void nd_traffic_bytes(const nd_groups *groups, int64_t bytes[ND_TRAFFIC_COUNT]);

#endif
