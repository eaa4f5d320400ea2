// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/export.h"
#include "trainer/commands/ckpt.h"

enum { FIRST_NAME = 256 };

/* A folder with a config.json that is no checkpoint and holds none is a Hugging Face folder. */
static nd_status open_side(const char *argument, char **folder, nd_manifest *manifest,
                           nd_diff_side *out)
{
    char *config = NULL;
    nd_folder *list = NULL;
    int count = 0;
    bool ours = false, model = false;
    nd_status status = ND_OK;
    ND_TRY(nd_ckpt_folder(argument, folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/config.json", *folder));
    ND_TRY_OUT(nd_folder_list(*folder, ND_FOLDER_WHOLE, &list, &count));
    ND_TRY_OUT(nd_checkpoint_is_ours(*folder, &ours));
    ND_TRY_OUT(nd_fs_exists(config, &model));
    if (ours || count > 0 || !model) {
        free(*folder);
        *folder = NULL;
        ND_TRY_OUT(nd_ckpt_open(argument, folder, manifest));
        *out = (nd_diff_side){.manifest = manifest, .shape = manifest->shape};
    } else {
        ND_TRY_OUT(nd_shape_read(config, &out->shape));
    }
    out->folder = *folder;
out:
    free(list);
    free(config);
    return status;
}

/* context: the name of the first array that differs, so far; NULL: it is not asked for. */
static nd_status print_array(void *context, const nd_diff_array *array)
{
    char *first = context;
    if (first && !*first && (array->differing > 0 || array->presence != ND_DIFF_BOTH)) {
        snprintf(first, FIRST_NAME, "%s", array->name);
    }
    if (array->presence == ND_DIFF_ONLY_A || array->presence == ND_DIFF_ONLY_B) {
        printf("%s: only in %s\n", array->name, array->presence == ND_DIFF_ONLY_A ? "A" : "B");
    } else if (array->presence == ND_DIFF_SIZES) {
        printf("%s: has another number of elements\n", array->name);
    } else if (array->differing > 0) {
        printf("%s: %lld of %lld elements differ, at most by %g (relative L2 norm %.2g)\n",
               array->name, (long long)array->differing, (long long)array->count, array->largest,
               array->relative);
    }
    return ND_OK;
}

/* How many numbers of the position differ. */
static int print_position(const nd_manifest *a, const nd_manifest *b)
{
    const struct {
        const char *name;
        int64_t a, b;
    } numbers[] = {
        {"step", a->position.step, b->position.step},
        {"steps skipped", a->position.skipped, b->position.skipped},
        {"labels seen", a->position.tokens_seen, b->position.tokens_seen},
        {"samples seen", a->samples_seen, b->samples_seen},
    };
    int differing = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (numbers[i].a != numbers[i].b) {
            printf("%s: %lld in A, %lld in B\n", numbers[i].name, (long long)numbers[i].a,
                   (long long)numbers[i].b);
            differing++;
        }
    }
    return differing;
}

static nd_status diff(const char *const folders[2], const nd_diff_options *options,
                      const char *same)
{
    nd_diff_totals totals;
    nd_diff_side sides[2] = {0};
    char *paths[2] = {NULL};
    nd_manifest manifests[2] = {0};
    nd_status status = ND_OK;
    int positions = 0;
    for (int i = 0; i < 2; i++) {
        ND_TRY_OUT(open_side(folders[i], &paths[i], &manifests[i], &sides[i]));
    }
    for (int i = 0; i < 2; i++) {
        const nd_manifest *m = sides[i].manifest;
        char mesh[ND_CKPT_TEXT_MAX];
        printf("%c: %s (", "AB"[i], paths[i]);
        if (m) {
            printf("step %lld, %s)\n", (long long)m->position.step, nd_ckpt_mesh(mesh, &m->mesh));
        } else {
            printf("a Hugging Face model: weights only)\n");
        }
    }
    ND_TRY_OUT(nd_checkpoint_diff(sides, options, print_array, NULL, &totals));
    if (sides[0].manifest && sides[1].manifest) {
        positions = print_position(sides[0].manifest, sides[1].manifest);
    }
    if (totals.differing_arrays == 0) {
        printf("%s: all %lld elements of %lld arrays %s%s\n", positions ? "different" : "equal",
               (long long)totals.elements, (long long)totals.arrays, same,
               positions ? ", but the position differs" : "");
    } else {
        printf("different: %lld of %lld arrays, %lld of %lld elements\n",
               (long long)totals.differing_arrays, (long long)totals.arrays,
               (long long)totals.differing, (long long)totals.elements);
    }
    nd_error_clear(); /* all is said */
    status = totals.differing_arrays > 0 || positions > 0 ? ND_ANSWER_NO : ND_OK;
out:
    for (int i = 0; i < 2; i++) {
        nd_manifest_fini(&manifests[i]);
        free(paths[i]);
    }
    return status;
}

/* Two steps that were dumped. */
static nd_status diff_dumps(const char *const folders[2], const nd_diff_options *options,
                            const char *same)
{
    nd_diff_totals totals;
    char first[FIRST_NAME] = "";
    printf("A: %s (a dump)\nB: %s (a dump)\n", folders[0], folders[1]);
    ND_TRY(nd_dump_diff(folders, options, print_array, first, &totals));
    if (*first) {
        printf("different: %lld of %lld tensors; the first one in the order of the computation is "
               "%s\n",
               (long long)totals.differing_arrays, (long long)totals.arrays, first);
        nd_error_clear(); /* all is said */
        return ND_ANSWER_NO;
    }
    printf("equal: %lld elements of %lld tensors %s\n", (long long)totals.elements,
           (long long)totals.arrays, same);
    return ND_OK;
}

nd_status nd_ckpt_diff(const nd_command_flags *line)
{
    const char *dtype = line->values[ND_CKPT_DIFF_DTYPE].text;
    const nd_diff_options options = {.verify = !line->values[ND_CKPT_DIFF_NO_VERIFY].given,
                                     .bf16 = dtype && strcmp(dtype, "bf16") == 0,
                                     .tolerance = line->values[ND_CKPT_DIFF_TOLERANCE].real};
    const char *const *folders = line->word;
    const char *same = options.tolerance > 0 ? "are within the tolerance" : "have the same bits";
    bool dumps[2];
    for (int i = 0; i < 2; i++) {
        ND_TRY(nd_dump_is(folders[i], &dumps[i]));
    }
    if (dumps[0] != dumps[1]) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" is a dump of tensors, and \"%s\" is none; give the folder of a step "
                       "of two dumps, such as RUN/dumps/step-1",
                       folders[!dumps[0]], folders[dumps[0]]);
    }
    return dumps[0] ? diff_dumps(folders, &options, same) : diff(folders, &options, same);
}
