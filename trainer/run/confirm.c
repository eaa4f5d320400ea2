// SPDX-License-Identifier: Apache-2.0
/* Loads a checkpoint of the run, and believes no rank alone that it is damaged. */
#include "trainer/run/checkpoints_parts.h"

/* The largest value of all ranks. */
static nd_status largest(nd_rank *r, int64_t *value)
{
    return nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, value, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL);
}

/* Rank 0 reads the manifest, and the files of the writer in which damage was found; without one
 * (-1) it looks at all files. ND_OK: it finds no damage. ND_ERR_DATA: it does. Another status: it
 * cannot tell. */
static nd_status read_again(const char *checkpoint, int64_t writer)
{
    nd_manifest manifest = {0};
    int64_t bytes = 0;
    nd_status status = nd_manifest_read(checkpoint, &manifest);
    if (status == ND_OK && writer >= 0 && writer < manifest.writer_count) {
        status = nd_source_verify_writer(checkpoint, &manifest, (int)writer);
    } else if (status == ND_OK) {
        status = nd_source_check_files(checkpoint, &manifest, &bytes);
    }
    nd_manifest_fini(&manifest);
    return status;
}

/* Rank 0 cannot tell whether the checkpoint is damaged; `own`: why, on rank 0. */
static nd_status fail_unread(nd_status status, int64_t first, const char *host, const nd_error *own)
{
    static const char text[] = "rank %lld finds damage, and rank 0 on %s cannot read the files "
                               "again to confirm it, so the checkpoint stays: %.500s";
    return status == ND_ERR_IO ? nd_fail_local(status, text, (long long)first, host, own->message)
                               : nd_fail(status, text, (long long)first, host, own->message);
}

/* Some rank has found damage; `own`: this one has. *elsewhere: this rank has no reason. */
static nd_status confirm(const nd_run_checkpoints *c, const char *checkpoint, int64_t suspect,
                         bool own, bool *elsewhere)
{
    nd_rank *r = c->trainer->rank;
    const nd_error error = *nd_error_last();
    const char *host = c->context->worker->identity.host;
    int64_t first = own ? r->world_size - r->rank : 0, found = 0;
    *elsewhere = false;
    ND_TRY(largest(r, &first));
    first = r->world_size - first; /* the lowest rank that found damage */
    suspect = r->rank == first ? suspect : 0;
    ND_TRY(largest(r, &suspect));
    if (r->rank == 0) {
        found = first > 0 ? read_again(checkpoint, suspect - 1) : ND_ERR_DATA;
    }
    const nd_error again = *nd_error_last();
    ND_TRY(largest(r, &found));
    if (found != ND_OK && found != ND_ERR_DATA) {
        *elsewhere = r->rank > 0;
        return fail_unread((nd_status)found, first, host, &again);
    }
    *elsewhere = found == ND_OK ? r->rank != first : !own;
    return found == ND_OK
               ? nd_fail_local(ND_ERR_IO,
                               "rank %d on %s finds damage where rank 0 finds none, so the "
                               "checkpoint stays; look at the memory and the file system of this "
                               "host: %.500s",
                               r->rank, host, error.message)
               : nd_fail(ND_ERR_DATA, "%s", error.message);
}

nd_status nd_run_restore(const nd_run_checkpoints *c, const char *checkpoint, nd_manifest *manifest,
                         nd_restored *restored)
{
    bool elsewhere = false;
    nd_status status =
        nd_restore_checkpoint(c->trainer, checkpoint, manifest,
                              c->trainer->rank->config->checkpoint.verify, &elsewhere, restored);
    if (status == ND_ERR_DATA) {
        status = confirm(c, checkpoint, restored->stats.suspect, !elsewhere, &elsewhere);
    }
    if (status != ND_OK && elsewhere) {
        return nd_fail_elsewhere(status, "another rank could not read %s", checkpoint);
    }
    return status;
}
