// SPDX-License-Identifier: Apache-2.0
#include "launcher/nodes.h"

nd_status nd_nodes_watch(nd_job *job)
{
    return job->join ? nd_join_watch(job) : nd_collect_watch(job);
}

void nd_nodes_failed(nd_job *job, int code)
{
    if (job->join) {
        nd_join_failed(job, code);
    } else if (job->nodes) {
        nd_collect_failed(job, code);
    }
}

void nd_nodes_ended(nd_job *job, int code, const char *screen)
{
    if (job->join) {
        nd_join_ended(job, code, screen);
    } else {
        nd_collect_ended(job, code, screen);
    }
}
