// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SAVER_H
#define ND_CHECKPOINT_SAVER_H
/*
 * Saves the state of a running trainer without stopping it, and loads it. Parameters and moments do
 * not change between two updates. A save that begins after step k therefore copies during the
 * forward and backward of step k+1, and the update of step k+1 waits, unit by unit, until the
 * writer has copied that unit. On a CPU the copy is the write itself: a slice is hashed and handed
 * to the page cache while it is still in the processor's cache. On a GPU it goes to pinned memory
 * on a stream of its own; the update on the device waits for the unit's copy, and the writer for
 * its event. The small entries that are alike on all ranks are copied at the begin, by the rank
 * that writes them.
 *
 * A saver belongs to the thread of its rank. Its writer thread has a queue of one job, touches no
 * communicator, and enqueues nothing on a GPU. It hangs when it has completed no read, write
 * or sync and copied no unit for launch.comm_timeout_seconds; whoever then waits for it gets
 * ND_ERR_HANG.
 */
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/source.h"
#include "trainer/step/step.h"

typedef struct nd_saver nd_saver;

typedef struct nd_saver_options {
    nd_trainer *trainer; /* committed; borrowed */
    const char *run;     /* borrowed, as all strings: the run folder, the same for all ranks */
    const char *run_id;  /* of this start of the job, the same for all ranks */
    const char *host;
    nd_checksum checksum;
    bool waits; /* checkpoint.staging wait: nd_saver_begin returns when the copy is made */
    int64_t keep_last, keep_every;
    int64_t restart_epoch;
    int64_t batch_samples; /* global batch */
    /* Rank 0: what the manifest says besides the state; borrowed. NULL: nothing. */
    json_t *identity, *config;
    /* Rank 0, on the writer's thread, before the commit: adds files to the folder, for instance the
     * exported model. NULL: nothing. */
    nd_status (*extra)(void *context, const char *temporary, const nd_manifest *manifest);
    uint64_t bytes;                   /* of a whole checkpoint with these files, about */
    nd_status (*gate)(void *context); /* as in nd_checkpoint_commit */
    /* Rank 0, on the writer's thread, at once when a checkpoint is durable. NULL: nothing. */
    void (*committed)(void *context, int64_t step);
    /* Tests: called on the writer's thread before each unit. */
    void (*before_unit)(void *context, int unit);
    void *context; /* of all these functions */
} nd_saver_options;

/* Pinned memory of a saver of this trainer, which may be only planned, on a GPU. */
nd_status nd_saver_pinned_bytes(const nd_trainer *trainer, size_t *bytes);
/* GPU: allocates the pinned memory. */
nd_status nd_saver_create(const nd_saver_options *options, nd_saver **out);
/*
 * Ends a save in flight where it is. False: the writer's thread hangs, or has not come to an end in
 * launch.comm_timeout_seconds. It still uses the saver and all that this borrows, down to the
 * context of the options' functions, and none of that may be destroyed. A later call tries again.
 * NULL is legal.
 */
bool nd_saver_destroy(nd_saver *saver);

/* From now on the checkpoint of this step stays, and the one that stayed before may go; 0: none. */
void nd_saver_keep_best(nd_saver *saver, int64_t step);

/* A save that ended. */
typedef struct nd_save_report {
    bool ended; /* since the last call; else nothing else is set */
    bool good;
    int64_t step;
    char reason[16];
    double blocked_seconds; /* that the loop waited, all parts together; not what the device did */
    double seconds;         /* from begin until durable */
    uint64_t bytes;         /* of the whole checkpoint; rank 0 */
    int deleted;            /* older checkpoints; rank 0 */
    char why[512];          /* not good: the reason, on the rank that has it; else "" */
    bool is_wrong;          /* and it is the state, or what was written of it, that is not right */
} nd_save_report;

/*
 * How far a save is travels with the flags of the next steps (nd_trainer_report_save), so no
 * collective is added to them. When all ranks have written, one all-gather of fixed-size records
 * follows at a step boundary, and a thread of rank 0 commits. A rank that cannot write tells all
 * others in the same way: all stop writing, rank 0 removes the temporary folder, and the older
 * checkpoints stay.
 */

/*
 * Begins to save the state after the last step; no save is in flight. All ranks call it.
 * `metrics_bytes`: the length of metrics.jsonl, on rank 0.
 */
nd_status nd_saver_begin(nd_saver *saver, const char *reason, int64_t metrics_bytes);
/* After each step, with the step's `save` flag, or between the batches of a validation, with the
 * largest flag of all ranks; a collective only when the save enters another phase. */
nd_status nd_saver_advance(nd_saver *saver, int64_t flag, nd_save_report *report);
/* Waits until the save in flight, if there is one, is durable or has failed, or this rank's writer
 * hangs. All ranks call it. */
nd_status nd_saver_finish(nd_saver *saver, nd_save_report *report);

/*
 * Loading, on any mesh. What several ranks hold is read by one of them, and the others get it by
 * broadcast (nd_shared_reads in weights.h). All ranks learn whether every one of them could read
 * before any state is passed on. A CPU reads straight into the state; for a GPU slices of at most
 * 64 MiB pass through host memory.
 */

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
