// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/model_files.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "trainer/checkpoint/folder.h"

/* Kinds. Each takes `folder`, also after a failure. */

static nd_status open_folder(char *folder, nd_model_files *out)
{
    out->kind = ND_MODEL_FOLDER;
    out->folder = folder;
    ND_TRY(nd_hf_reader_open(folder, &out->reader));
    ND_TRY(nd_hf_reader_check(out->reader));
    out->shape = *nd_hf_reader_shape(out->reader);
    return nd_fs_format(&out->side, "%s", nd_hf_reader_folder(out->reader));
}

static const char *setting_of(const nd_manifest *manifest, const char *key)
{
    const char *value = nd_manifest_find(manifest->config, key);
    return value ? value : "";
}

/* The folder of the files beside the weights of a model.path; owned by the caller. */
static nd_status folder_of(const char *path, char **out)
{
    nd_fs_kind kind;
    nd_hf_reader *file = NULL;
    ND_TRY(nd_fs_look(path, &kind, NULL));
    if (kind != ND_FS_FILE) {
        return nd_fs_format(out, "%s", path);
    }
    ND_TRY(nd_hf_reader_open(path, &file));
    const nd_status status = nd_fs_format(out, "%s", nd_hf_reader_folder(file));
    nd_hf_reader_close(file);
    return status;
}

/* The model beside the state; that of the run; the one that the run began with. */
static nd_status find_side(nd_model_files *m)
{
    const char *began = setting_of(&m->manifest, "model.path");
    const char *name = setting_of(&m->manifest, "model.name");
    char *parent = NULL, *saved = NULL, *first = NULL;
    bool has = false;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_has(m->folder, "config.json", &has));
    if (has) {
        return nd_fs_format(&m->side, "%s", m->folder);
    }
    ND_TRY_OUT(nd_fs_parent(m->folder, &parent));
    ND_TRY_OUT(nd_fs_format(&saved, "%s/model", parent));
    ND_TRY_OUT(nd_fs_has(saved, "config.json", &has));
    if (has) {
        m->side = saved;
        saved = NULL;
        goto out;
    }
    status = began[0] ? folder_of(began, &first) : ND_OK;
    ND_TRY_OUT(status == ND_ERR_DATA ? ND_OK : status); /* the checkpoint is whole without it */
    ND_TRY_OUT(first ? nd_fs_has(first, "config.json", &has) : ND_OK);
    m->side_is_base = true;
    if (has) {
        m->side = first;
        first = NULL;
    } else if (name[0]) {
        status = nd_hf_cache_find(name, &m->side);
        status = status == ND_ERR_IO ? status : ND_OK; /* a missing tokenizer is said later */
    }
out:
    free(first);
    free(saved);
    free(parent);
    return status;
}

static nd_status open_checkpoint(char *folder, nd_model_files *out)
{
    out->kind = ND_MODEL_CHECKPOINT;
    out->folder = folder;
    ND_TRY(nd_manifest_read(folder, &out->manifest));
    out->shape = out->manifest.shape;
    out->bytes = out->shape.vocab == 256 &&
                 strcmp(setting_of(&out->manifest, "data.tokenizer"), "bytes") == 0;
    return find_side(out);
}

/* RUN/model, or RUN's newest checkpoint. */
static nd_status open_run(char *run, nd_model_files *out)
{
    char *inside = NULL;
    nd_folder *list = NULL;
    int count = 0;
    bool has = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&inside, "%s/model", run));
    ND_TRY_OUT(nd_fs_has(inside, "config.json", &has));
    if (has) {
        status = open_folder(inside, out);
        inside = NULL;
        goto out;
    }
    ND_TRY_OUT(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &count));
    if (count == 0) {
        status =
            nd_fail(ND_ERR_DATA,
                    "\"%s\" is no model: it has neither config.json, nor a folder model, nor a "
                    "checkpoint",
                    run);
        goto out;
    }
    free(inside);
    inside = NULL;
    ND_TRY_OUT(nd_checkpoint_path(run, list[count - 1].step, &inside));
    status = open_checkpoint(inside, out);
    inside = NULL;
out:
    free(list);
    free(inside);
    free(run);
    return status;
}

/* The entry of a folder that is nearly called `name`. */
static nd_status find_near(const char *folder, const char *name, char *near, size_t capacity)
{
    nd_suggest search;
    nd_fs_names names;
    ND_TRY(nd_fs_list(folder, &names));
    nd_suggest_init(&search, name);
    for (int i = 0; i < names.count; i++) {
        nd_suggest_offer(&search, names.list[i]);
    }
    snprintf(near, capacity, "%s", search.best ? search.best : "");
    nd_fs_names_fini(&names);
    return ND_OK;
}

/* A path, or ORG/NAME, which looks like one: in a folder that is there it is a path. */
static nd_status find_in_cache(const char *name, char **out)
{
    char *parent = NULL, near[256];
    const char *slash = strrchr(name, '/');
    bool there = false;
    ND_TRY(nd_fs_parent(name, &parent));
    nd_status status = nd_fs_is_folder(parent, &there);
    const bool inside = slash && there;
    if (status == ND_OK && !inside && slash && strchr(name, '/') == slash && slash > name &&
        name[0] != '.') {
        free(parent);
        return nd_hf_cache_find(name, out);
    }
    status =
        status == ND_OK ? find_near(parent, slash ? slash + 1 : name, near, sizeof near) : status;
    status =
        status != ND_OK ? status
        : near[0]
            ? nd_fail(ND_ERR_DATA, "the model \"%.300s\" does not exist; did you mean %s%s%s?",
                      name, slash ? parent : "", slash ? "/" : "", near)
            : nd_fail(ND_ERR_DATA,
                      "the model \"%.300s\" does not exist; it is a model's folder, a run folder, "
                      "one of its checkpoints, or ORG/NAME in the local cache",
                      name);
    free(parent);
    return status;
}

static nd_status open_any(const char *name, nd_model_files *out)
{
    char *folder = NULL;
    nd_fs_kind kind;
    bool manifest = false, model = false;
    ND_TRY(nd_fs_look(name, &kind, NULL));
    if (kind != ND_FS_FOLDER) {
        ND_TRY(kind == ND_FS_ABSENT ? find_in_cache(name, &folder)
                                    : nd_fs_format(&folder, "%s", name));
        return open_folder(folder, out);
    }
    ND_TRY(nd_fs_format(&folder, "%s", name));
    for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--) {
        folder[n - 1] = '\0';
    }
    nd_status status = nd_fs_has(folder, ND_MANIFEST_NAME, &manifest);
    status = status == ND_OK ? nd_fs_has(folder, "config.json", &model) : status;
    if (status != ND_OK) {
        free(folder);
        return status;
    }
    return manifest ? open_checkpoint(folder, out)
           : model  ? open_folder(folder, out)
                    : open_run(folder, out);
}

nd_status nd_model_files_open(const char *name, nd_model_files *out)
{
    *out = (nd_model_files){0};
    nd_status status = open_any(name, out);
    if (status != ND_OK) {
        nd_model_files_close(out);
    }
    return status;
}

void nd_model_files_close(nd_model_files *m)
{
    nd_hf_reader_close(m->reader);
    nd_manifest_fini(&m->manifest);
    free(m->folder);
    free(m->side);
    *m = (nd_model_files){0};
}

/* Tokenizer. */

static nd_status open_bytes(const nd_model_files *m, nd_tokenizer **out)
{
    if (m->shape.vocab < 256) {
        return nd_fail(ND_ERR_CONFIG,
                       "--tokenizer is bytes, but the model's vocab_size is %lld; it must be at "
                       "least 256",
                       (long long)m->shape.vocab);
    }
    return nd_byte_tokenizer_create(out);
}

/* The tokenizer.json in a folder, or the path itself; owned by the caller. */
static nd_status path_of(const char *given, char **out)
{
    bool folder = false;
    ND_TRY(nd_fs_is_folder(given, &folder));
    return nd_fs_format(out, folder ? "%s/tokenizer.json" : "%s", given);
}

/* The folder or file that data.tokenizer of a checkpoint's run named; "": none. *owned is freed by
 * the caller. */
static nd_status given_to_run(const nd_model_files *m, char **owned, const char **given)
{
    *given = setting_of(&m->manifest, "data.tokenizer");
    if (strcmp(*given, "bytes") == 0 || strcmp(*given, "file") == 0) {
        *given = "";
    }
    if (strcmp(*given, "model") != 0) {
        return ND_OK;
    }
    const char *config = setting_of(&m->manifest, "model.config");
    *given = setting_of(&m->manifest, "model.path");
    if (**given || *config) {
        ND_TRY(**given ? folder_of(*given, owned) : nd_fs_parent(config, owned));
        *given = *owned;
    }
    return ND_OK;
}

/* The tokenizer.json that the run of a checkpoint was given; NULL: it had none. Owned by the
 * caller. ND_ERR_CONFIG: it is not there any more; ND_ERR_DATA: another one is. */
static nd_status find_of_run(const nd_model_files *m, char **out)
{
    char *owned = NULL, now[65];
    const char *given = "";
    ND_TRY(m->kind == ND_MODEL_CHECKPOINT ? given_to_run(m, &owned, &given) : ND_OK);
    nd_status status = given[0] ? path_of(given, out) : ND_OK;
    free(owned);
    if (status != ND_OK || !*out) {
        return status;
    }
    const char *then = nd_manifest_find(m->manifest.identity, "tokenizer.json");
    bool there = false;
    status = nd_fs_exists(*out, &there);
    if (status == ND_OK && !there) {
        status = nd_fail(ND_ERR_CONFIG,
                         "the run's tokenizer \"%s\" is not found from here; name it with "
                         "--tokenizer, which can also be file: ids without texts",
                         *out);
    } else if (status == ND_OK && then && (status = nd_sha256_file(*out, now)) == ND_OK &&
               strcmp(then, now) != 0) {
        status = nd_fail(ND_ERR_DATA,
                         "\"%s\" is not the tokenizer that the run of this checkpoint had (digest "
                         "%.12s, not %.12s); name that one with --tokenizer",
                         *out, now, then);
    }
    if (status != ND_OK) {
        free(*out);
        *out = NULL;
    }
    return status;
}

nd_status nd_model_files_tokenizer(const nd_model_files *m, const char *setting, char **path,
                                   nd_tokenizer **out)
{
    bool there = false;
    nd_status status = ND_OK;
    *path = NULL;
    *out = NULL;
    if (setting && strcmp(setting, "file") == 0) {
        return ND_OK;
    }
    if (setting && strcmp(setting, "bytes") == 0) {
        return open_bytes(m, out);
    }
    if (setting) {
        ND_TRY_OUT(path_of(setting, path));
        ND_TRY_OUT(nd_fs_exists(*path, &there));
        ND_TRY_OUT(there ? ND_OK
                         : nd_fail(ND_ERR_CONFIG,
                                   "--tokenizer \"%s\" does not exist; it is bytes, file, or the "
                                   "path of a tokenizer.json or of its folder",
                                   setting));
    } else {
        ND_TRY_OUT(m->side ? nd_fs_has(m->side, "tokenizer.json", &there) : ND_OK);
        /* The run may have had another tokenizer than the model that it began with. */
        ND_TRY_OUT(!there || m->side_is_base ? find_of_run(m, path) : ND_OK);
        there = there && !*path && !(m->side_is_base && m->bytes);
        ND_TRY_OUT(there ? nd_fs_format(path, "%s/tokenizer.json", m->side) : ND_OK);
    }
    status = *path ? nd_tokenizer_open(*path, out) : m->bytes ? open_bytes(m, out) : ND_OK;
out:
    if (status != ND_OK) {
        free(*path);
        *path = NULL;
    }
    return status;
}

/* The run. */

nd_status nd_model_files_run_length(const nd_model_files *m, int64_t *length)
{
    static const char key[] = "train.sequence_length";
    enum { RECORD_BYTES_MAX = 64 << 20 };
    char *run = NULL, *path = NULL, *text = NULL;
    size_t size = 0;
    *length = 0;
    if (m->kind == ND_MODEL_CHECKPOINT) {
        *length = strtoll(setting_of(&m->manifest, key), NULL, 10);
        return ND_OK;
    }
    ND_TRY(nd_fs_parent(m->folder, &run));
    nd_status status = nd_fs_format(&path, "%s/run.json", run);
    status =
        status == ND_OK ? nd_fs_read(path, RECORD_BYTES_MAX, ND_ERR_DATA, &text, &size) : status;
    if (status == ND_OK) {
        json_t *record = json_loadb(text, size, 0, NULL);
        const json_int_t value =
            json_integer_value(json_object_get(json_object_get(record, "config"), key));
        *length = value > 0 ? (int64_t)value : 0;
        json_decref(record);
    }
    free(text);
    free(path);
    free(run);
    return status == ND_ERR_DATA ? ND_OK : status; /* without a good one the length is unknown */
}

/* Weights. */

static nd_status want_span(void *context, const nd_span *span, float *to)
{
    return nd_source_add(context, span, ND_STATE_MASTER, to);
}

static nd_status run_source(void *context)
{
    return nd_source_run(context);
}

nd_status nd_model_files_load(const nd_model_files *m, nd_fsdp *fsdp)
{
    nd_source *source = NULL;
    if (m->kind == ND_MODEL_FOLDER) {
        return nd_weights_load(fsdp, m->reader);
    }
    nd_status status = nd_source_open(m->folder, &m->manifest, true, &source);
    status = nd_shared_agree(fsdp->rank, status, "the model");
    if (status == ND_OK) {
        const nd_values values = {.context = source, .want = want_span, .run = run_source};
        status = nd_weights_fill(fsdp, &values, false);
    }
    nd_source_close(source);
    return status;
}
