// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/diff.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/commands/ckpt.h"

typedef struct side {
    char *folder;
    nd_manifest manifest;
    bool is_checkpoint; /* else a Hugging Face folder */
    nd_shape shape;
} side;

enum { FIRST_NAME = 256 };

static void side_fini(side *s)
{
    nd_manifest_fini(&s->manifest);
    free(s->folder);
}

/* A folder with a config.json that is no checkpoint and holds none is a Hugging Face folder. */
static nd_status open_side(const char *argument, side *out)
{
    char *folder = NULL, *config = NULL;
    nd_folder *list = NULL;
    int count = 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_ckpt_folder(argument, &folder));
    ND_TRY_OUT(nd_fs_format(&config, "%s/config.json", folder));
    ND_TRY_OUT(nd_folder_list(folder, ND_FOLDER_WHOLE, &list, &count));
    bool ours = false, model = false;
    ND_TRY_OUT(nd_checkpoint_is_ours(folder, &ours));
    ND_TRY_OUT(nd_fs_exists(config, &model));
    out->is_checkpoint = ours || count > 0 || !model;
    if (out->is_checkpoint) {
        ND_TRY_OUT(nd_ckpt_open(argument, &out->folder, &out->manifest));
        out->shape = out->manifest.shape;
    } else {
        ND_TRY_OUT(nd_shape_read(config, &out->shape));
        out->folder = folder;
        folder = NULL;
    }
out:
    free(list);
    free(config);
    free(folder);
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

static void print_side(const char *letter, const side *s)
{
    char mesh[ND_CKPT_TEXT_MAX];
    if (s->is_checkpoint) {
        printf("%s: %s (step %lld, %s)\n", letter, s->folder, (long long)s->manifest.position.step,
               nd_ckpt_mesh(mesh, &s->manifest.mesh));
    } else {
        printf("%s: %s (a Hugging Face model: weights only)\n", letter, s->folder);
    }
}

static nd_status diff(const side sides[2], const nd_diff_options *options, int *code)
{
    nd_diff_totals totals;
    nd_diff_side of[2];
    for (int s = 0; s < 2; s++) {
        of[s] = (nd_diff_side){.folder = sides[s].folder,
                               .manifest = sides[s].is_checkpoint ? &sides[s].manifest : NULL,
                               .shape = sides[s].shape};
        print_side(s == 0 ? "A" : "B", &sides[s]);
    }
    bool both = of[0].manifest && of[1].manifest;
    ND_TRY(nd_checkpoint_diff(of, options, print_array, NULL, &totals));
    int positions = both ? print_position(of[0].manifest, of[1].manifest) : 0;
    if (totals.differing_arrays == 0) {
        printf("%s: all %lld elements of %lld arrays %s%s\n", positions ? "different" : "equal",
               (long long)totals.elements, (long long)totals.arrays,
               options->tolerance > 0 ? "are within the tolerance" : "have the same bits",
               positions ? ", but the position differs" : "");
    } else {
        printf("different: %lld of %lld arrays, %lld of %lld elements\n",
               (long long)totals.differing_arrays, (long long)totals.arrays,
               (long long)totals.differing, (long long)totals.elements);
    }
    *code = totals.differing_arrays > 0 || positions > 0 ? ND_ANSWER_NO : 0;
    return ND_OK;
}

/* Two steps that were dumped. */
static nd_status diff_dumps(const char *const folders[2], const nd_diff_options *options, int *code)
{
    nd_diff_totals totals;
    char first[FIRST_NAME] = "";
    printf("A: %s (a dump)\nB: %s (a dump)\n", folders[0], folders[1]);
    ND_TRY(nd_dump_diff(folders, options, print_array, first, &totals));
    if (*first) {
        printf("different: %lld of %lld tensors; the first one in the order of the computation is "
               "%s\n",
               (long long)totals.differing_arrays, (long long)totals.arrays, first);
        *code = ND_ANSWER_NO;
    } else {
        printf("equal: %lld elements of %lld tensors %s\n", (long long)totals.elements,
               (long long)totals.arrays,
               options->tolerance > 0 ? "are within the tolerance" : "have the same bits");
    }
    return ND_OK;
}

static nd_status find_dumps(const char *const folders[2], bool *out)
{
    bool is[2];
    ND_TRY(nd_dump_is(folders[0], &is[0]));
    ND_TRY(nd_dump_is(folders[1], &is[1]));
    *out = is[0];
    return is[0] == is[1] ? ND_OK
                          : nd_fail(ND_ERR_DATA,
                                    "\"%s\" is a dump of tensors, and \"%s\" is none; give the "
                                    "folder of a step of two dumps, such as RUN/dumps/step-1",
                                    folders[!is[0]], folders[is[0]]);
}

nd_status nd_ckpt_diff(const nd_command_flags *line, int *code)
{
    side sides[2] = {0};
    const char *dtype = line->values[ND_CKPT_DIFF_DTYPE].text;
    const nd_diff_options options = {.verify = !line->values[ND_CKPT_DIFF_NO_VERIFY].given,
                                     .bf16 = dtype && strcmp(dtype, "bf16") == 0,
                                     .tolerance = line->values[ND_CKPT_DIFF_TOLERANCE].real};
    const char *const folders[] = {nd_ckpt_place(line, 0), nd_ckpt_place(line, 1)};
    bool dumps = false;
    ND_TRY(find_dumps(folders, &dumps));
    if (dumps) {
        return diff_dumps(folders, &options, code);
    }
    nd_status status = open_side(nd_ckpt_place(line, 0), &sides[0]);
    status = status == ND_OK ? open_side(nd_ckpt_place(line, 1), &sides[1]) : status;
    status = status == ND_OK ? diff(sides, &options, code) : status;
    side_fini(&sides[0]);
    side_fini(&sides[1]);
    return status;
}
