// SPDX-License-Identifier: Apache-2.0
/* Messages that the ranks of a job send each other through its store. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "trainer/run/state.h"

nd_status nd_run_tell_all(const nd_worker *worker, const char *key, nd_status status,
                          const char *fault, void *value, size_t bytes)
{
    const nd_error error = *nd_error_last();
    const size_t size = sizeof(int64_t) + bytes;
    size_t got = size;
    int64_t told = status;
    char *message = NULL;
    ND_TRY(nd_alloc(size, 1, (void **)&message));
    value = value ? value : message; /* of no bytes */
    if (worker->identity.rank == 0) {
        memcpy(message, &told, sizeof told);
        memcpy(message + sizeof told, value, bytes);
        nd_status sent = nd_store_set(worker->store, key, message, size);
        free(message);
        if (status != ND_OK) {
            nd_error_restore(&error);
        }
        return status != ND_OK ? status : sent;
    }
    nd_status read = nd_store_get(worker->store, key, message, &got);
    if (read == ND_OK && got != size) {
        read = nd_fail(ND_ERR_INTERNAL, "the value of '%s' in the store has %zu bytes", key, got);
    }
    if (read == ND_OK) {
        memcpy(&told, message, sizeof told);
        memcpy(value, message + sizeof told, bytes);
    }
    free(message);
    ND_TRY(read);
    return told == ND_OK ? ND_OK : nd_fail_elsewhere((nd_status)told, "rank 0 %s", fault);
}

enum { HEX_BYTES = 65, TEXT_MAX = 64 << 10 };

static const char text_key[] = "configuration of rank 0", explained[] = "configurations differ";

nd_status nd_inputs_print_digests(const nd_inputs *inputs, const char *before, char between,
                                  FILE *out)
{
    const nd_dataset *const data[] = {inputs->data, inputs->validation};
    static const char *const keys[] = {"data.path", "data.validation_path"};
    char hex[HEX_BYTES], *text = NULL;
    size_t size;
    FILE *shape = open_memstream(&text, &size);
    if (shape) {
        nd_shape_print(&inputs->shape, shape);
    }
    if (!shape || fclose(shape) != 0) {
        free(text);
        return nd_fail_memory("the model's shape");
    }
    nd_status status = nd_sha256(text, strlen(text), hex);
    free(text);
    ND_TRY(status);
    fprintf(out, "%smodel.config%c%s\n", before, between, hex);
    for (int i = 0; i < 2 && data[i]; i++) {
        ND_TRY(nd_dataset_digest(data[i], hex));
        fprintf(out, "%s%s%c%s\n", before, keys[i], between, hex);
    }
    return ND_OK;
}

static nd_status job_text(const nd_config *config, const nd_inputs *inputs, char **out)
{
    char *settings = NULL;
    size_t bytes;
    nd_status status = ND_OK;
    ND_TRY(nd_config_job_text(config, &settings));
    FILE *text = open_memstream(out, &bytes);
    if (text) {
        fputs(settings, text);
        status = nd_inputs_print_digests(inputs, "", '=', text);
    }
    free(settings);
    if (!text || (fclose(text) != 0 && status == ND_OK)) { /* a part of it is not compared */
        status = nd_fail_memory("the settings of the job");
    }
    if (text && status != ND_OK) {
        free(*out);
    }
    return status;
}

/* Called on the first rank that differs: fails with the key and both values. Rank 0, whose text has
 * one of them, waits at the barrier until this rank has read it. */
static nd_status explain(const nd_worker *worker, const char *text)
{
    char *theirs = NULL, names[2][192];
    size_t bytes = TEXT_MAX;
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(TEXT_MAX + 1, &theirs));
    ND_TRY_OUT(nd_store_get(worker->store, text_key, theirs, &bytes));
    /* A barrier that fails, as rank 0 has ended meanwhile, changes nothing of what was read. */
    (void)nd_store_barrier(worker->store, explained);
    snprintf(names[0], sizeof names[0], "rank 0 (%s)", worker->peers.cards[0].host);
    snprintf(names[1], sizeof names[1], "rank %d (%s)", worker->identity.rank,
             worker->identity.host);
    ND_TRY_OUT(nd_config_diff(theirs, names[0], text, names[1]));
    status = nd_fail(ND_ERR_INTERNAL, "equal configurations have different digests");
out:
    free(theirs);
    return status;
}

nd_status nd_settings_compare_text(const nd_worker *worker, const char *text)
{
    const int rank = worker->identity.rank, world_size = worker->identity.world_size;
    char own[HEX_BYTES], *all = NULL;
    int differs = 1;
    ND_TRY(nd_sha256(text, strlen(text), own));
    ND_TRY(rank == 0 ? nd_store_set(worker->store, text_key, text, strlen(text)) : ND_OK);
    ND_TRY(ND_ALLOC((size_t)world_size * HEX_BYTES, &all));
    nd_status status = nd_store_exchange(worker->store, "configurations", own, all, HEX_BYTES);
    while (differs < world_size && memcmp(all, all + (size_t)differs * HEX_BYTES, HEX_BYTES) == 0) {
        differs++;
    }
    free(all);
    if (status != ND_OK || differs == world_size) {
        return status;
    }
    if (rank == differs) {
        return explain(worker, text);
    }
    ND_TRY(nd_store_barrier(worker->store, explained));
    return nd_fail_elsewhere(
        ND_ERR_CONFIG, "the configuration of rank %d (%s) is not that of rank 0 (%s)", differs,
        worker->peers.cards[differs].host, worker->peers.cards[0].host);
}

nd_status nd_settings_compare(nd_worker *worker, const nd_config *config, const nd_inputs *inputs)
{
    char *text = NULL;
    nd_identity_source source = worker->identity.source;
    if (source == ND_IDENTITY_NDLAUNCH || worker->identity.world_size == 1) {
        return ND_OK; /* ndlaunch has compared the nodes */
    }
    ND_TRY(job_text(config, inputs, &text));
    nd_status status = nd_settings_compare_text(worker, text);
    free(text);
    return status;
}
