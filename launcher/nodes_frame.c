// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "launcher/nodes.h"

double nd_nodes_limit(const nd_job *job)
{
    return job->config->launch.rdzv_timeout_seconds + nd_config_data_seconds(job->config);
}

void nd_node_frame(nd_wire_buffer *out, int type, const uint32_t *numbers, int count,
                   const char *text)
{
    nd_wire_begin(out, (nd_wire_type)type);
    for (int i = 0; i < count; i++) {
        nd_wire_put_u32(out, numbers[i]);
    }
    if (text) {
        nd_wire_put_blob(out, text, strlen(text));
    }
}
