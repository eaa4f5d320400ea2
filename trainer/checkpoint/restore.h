// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_RESTORE_H
#define ND_CHECKPOINT_RESTORE_H
/*
 * Loads a checkpoint into a trainer, on any mesh.
 *
 * What several ranks hold is read by one of them, and the others get it by broadcast
 * (nd_shared_reads in weights.h). All ranks learn whether every one of them could read before any
 * state is passed on. A CPU reads straight into the state; for a GPU slices of at most 64 MiB pass
 * through host memory.
 */
#include "trainer/checkpoint/source.h"
#include "trainer/step/step.h"

typedef struct nd_restored {
    bool moments;          /* they were stored, and were loaded */
    bool leaves;           /* moments were stored, and the optimizer has none */
    bool scales;           /* FP8 scales and histories were loaded, or the recipe has none */
    bool scales_differ;    /* they were stored, of another recipe, and were not loaded */
    nd_source_stats stats; /* of this rank */
} nd_restored;

/* Host memory that a load to a GPU takes, of so many state arrays. */
size_t nd_restore_host_bytes(const nd_layout *layout, int arrays);

/*
 * Loads a checkpoint into a committed trainer, and sets its position. Collective. When some
 * rank fails, all do, with the same status: that rank with its reason, the others with an error of
 * another rank. ND_ERR_DATA: it is damaged, as rank 0 finds too, which reads again what the first
 * rank with damage has named. ND_ERR_IO: a read failed, or one rank alone finds damage, and names
 * itself and its host. The manifest is that of the folder; the caller gives it empty and ends it,
 * also after a failure.
 */
nd_status nd_restore_checkpoint(nd_trainer *trainer, const char *folder, nd_manifest *manifest,
                                bool verify, nd_restored *out);

#endif
