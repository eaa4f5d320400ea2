// SPDX-License-Identifier: Apache-2.0
/* What commands that are workers of a job have in common: how they begin, and what they need. */
#include <sys/resource.h>

#include "trainer/commands/command.h"

/* Workers of a host exchange data through shared memory, which is made of files. */
static nd_status check_file_limit(const nd_identity *id)
{
    const rlim_t needed = (rlim_t)8 << 20;
    struct rlimit limit;
    if (id->world_size == 1 || getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur >= needed) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CANTCREATE,
                   "shared memory between workers needs files of up to %llu bytes, but files of at "
                   "most %llu may be written (ulimit -f); raise this limit",
                   (unsigned long long)needed, (unsigned long long)limit.rlim_cur);
}

static nd_status check_world(const nd_config *config, const nd_identity *id)
{
    int world = nd_mesh_world_size(&config->resolved_mesh);
    if (world == id->world_size) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "the configuration needs %d workers, but this job has %d (%s); start it with "
                   "ndlaunch, or with as many "
                   "tasks as launch.workers",
                   world, id->world_size, nd_identity_source_name(id->source));
}

nd_status nd_job_check(const nd_config *config, const nd_identity *id)
{
    ND_TRY(check_world(config, id));
    return check_file_limit(id);
}

/* Signals come before the job is joined, which may take long. */
nd_status nd_job_begin(nd_worker *worker, void (*stop)(int signal_number))
{
    nd_status status = nd_identity_read(&worker->identity);
    nd_process_install_signals(&worker->identity, stop);
    nd_failure_slot *record = nd_identity_record(&worker->identity);
    if (record) {
        atomic_store(&record->ready, 1);
    }
    return status == ND_OK ? nd_identity_join(&worker->identity) : status;
}
