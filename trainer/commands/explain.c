// SPDX-License-Identifier: Apache-2.0
/* `ndtrain plan --explain`: why a buffer is as large as it is, and what other settings need. */
#include <stdio.h>
#include <stdlib.h>

#include "runtime/base/math.h"
#include "trainer/commands/plan.h"

static void print_reasons(void)
{
    static const char *const reasons[][2] = {
        {"state",
         "F32 weights, their gradients and AdamW's two moments: 16 bytes for each parameter of the "
         "shard; mesh.dp_shard, mesh.cp and mesh.tp divide them, optimizer.name sgd has no "
         "moments"},
        {"gathered weights",
         "the units in work, or with parallel.reshard_after_forward false all of them; mesh.tp "
         "divides them, fp8.all_gather halves them"},
        {"unsharded gradients",
         "F32, before they are added up over the shards; mesh.tp divides them"},
        {"activations",
         "what backward needs: they grow with train.micro_batch_size and train.sequence_length; "
         "parallel.recompute, mesh.cp and mesh.tp make them smaller"},
        {"scratch",
         "one layer at a time; it grows with the tokens of a micro-batch, too, unless for the MLP "
         "with parallel.tiled_mlp"},
        {"head", "logits of one chunk of tokens, never of all; mesh.tp divides the vocabulary"},
    };
    printf("why:\n");
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        printf("  %-22s %s\n", reasons[i][0], reasons[i][1]);
    }
}

/* How long each way of exchanging keys or heads would make a rank wait. */
static void print_exchanges(const nd_planner *p)
{
    const nd_shape *shape = &p->inputs->shape;
    const nd_mesh *mesh = &p->config->resolved_mesh;
    nd_cp_exchange list[ND_CP_EXCHANGES_MAX], own = nd_cp_exchange_of(shape, p->config);
    char name[64];
    if (mesh->size[ND_AXIS_CP] == 1) {
        return;
    }
    const int count = nd_cp_list_exchanges(shape, p->config, list);
    printf("attention over the %d ranks of mesh.cp: %s%s; GB that a worker sends for it in a step "
           "and waits for at once:\n",
           mesh->size[ND_AXIS_CP], nd_cp_exchange_format(&own, mesh, name, sizeof name),
           p->config->parallel.cp_comm == ND_CP_AUTO ? ", the least as parallel.cp_comm auto asks"
                                                     : "");
    for (int i = 0; i < count; i++) {
        printf("  %-26s %.4g\n", nd_cp_exchange_format(&list[i], mesh, name, sizeof name),
               list[i].exposed_bytes * 1e-9);
    }
}

/* The table of other settings, each alone. */

typedef struct table {
    const nd_planner *planner;
    double own; /* bytes of the plan as it is */
} table;

static nd_status print_row(const table *t, const char *name, const nd_trainer *trainer)
{
    char estimate[ND_ESTIMATE_TEXT_MAX];
    const double bytes = nd_plan_bytes(trainer);
    ND_TRY(nd_estimate_format(trainer, false, estimate));
    printf("  %-64s %9.3f GiB %+6.1f %%  %s\n", name, bytes / nd_gib, (bytes / t->own - 1) * 100,
           estimate);
    return ND_OK;
}

/* The run with other values of one key or two; they are already in `changed`. A setting that cannot
 * be is a row that says why. */
static nd_status try_keys(const table *t, nd_config *changed, const char *key, const char *second)
{
    char *value = NULL, *second_value = NULL, name[96];
    nd_trainer *trainer = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_get(changed, key, &value));
    ND_TRY_OUT(second ? nd_config_get(changed, second, &second_value) : ND_OK);
    if (second) {
        snprintf(name, sizeof name, "%s: %s, %s: %s", key, value, second, second_value);
    } else if (changed->launch.workers != t->planner->config->launch.workers) {
        snprintf(name, sizeof name, "%s: %s, on %lld workers", key, value,
                 (long long)changed->launch.workers);
    } else {
        snprintf(name, sizeof name, "%s: %s", key, value);
    }
    status = nd_plan_make_changed(t->planner, changed, &trainer);
    status = status == ND_OK ? print_row(t, name, trainer) : status;
    if (status != ND_OK) {
        printf("  %-64s not possible: %s\n", name, nd_error_last()->message);
        nd_error_clear();
        status = ND_OK;
    }
out:
    nd_trainer_destroy(trainer);
    free(second_value);
    free(value);
    return status;
}

/* The changes that the run can make and that leave what is learned as it is. */
static nd_status print_changes(const table *t)
{
    static const char *const axes[] = {"mesh.dp_shard", "mesh.cp", "mesh.tp"};
    const nd_config *config = t->planner->config;
    nd_config c; /* borrows the texts of the run's own */
    for (nd_recompute r = ND_RECOMPUTE_NONE; r <= ND_RECOMPUTE_FULL; r++) {
        c = *config;
        c.parallel.recompute = r;
        ND_TRY(r != config->parallel.recompute ? try_keys(t, &c, "parallel.recompute", NULL)
                                               : ND_OK);
    }
    c = *config;
    c.parallel.tiled_mlp = config->parallel.tiled_mlp == -1 ? 1 : -1;
    ND_TRY(try_keys(t, &c, "parallel.tiled_mlp", NULL));
    c = *config;
    c.parallel.reshard_after_forward = !config->parallel.reshard_after_forward;
    ND_TRY(try_keys(t, &c, "parallel.reshard_after_forward", NULL));
    for (nd_cp_comm way = 0; way <= ND_CP_ULYSSES && config->mesh.cp > 1; way++) {
        c = *config;
        c.parallel.cp_comm = way;
        c.parallel.ulysses = 1;
        ND_TRY(way != config->parallel.cp_comm || config->parallel.ulysses > 1
                   ? try_keys(t, &c, "parallel.cp_comm", NULL)
                   : ND_OK);
    }
    if (config->train.micro_batch_size > 1) {
        c = *config;
        c.train.micro_batch_size = 1;
        c.train.gradient_accumulation_steps *= config->train.micro_batch_size;
        ND_TRY(try_keys(t, &c, "train.micro_batch_size", "train.gradient_accumulation_steps"));
    }
    for (int i = 0; i < 3; i++) {
        c = *config;
        int64_t *const sizes[] = {&c.mesh.dp_shard, &c.mesh.cp, &c.mesh.tp};
        *sizes[i] *= 2;
        c.launch.workers *= 2;
        ND_TRY(try_keys(t, &c, axes[i], NULL));
    }
    return ND_OK;
}

nd_status nd_plan_explain(const nd_planner *p)
{
    table t = {.planner = p};
    nd_trainer *trainer = NULL;
    nd_status status = ND_OK;
    print_reasons();
    print_exchanges(p);
    ND_TRY(nd_plan_make(p, p->config, NULL, &trainer));
    ND_TRY_OUT(nd_estimate_explain(trainer));
    t.own = nd_plan_bytes(trainer);
    printf("what other settings would need, each alone, of a worker and by the same estimate; "
           "further workers are on further hosts like this one:\n");
    ND_TRY_OUT(print_row(&t, "as it is", trainer));
out:
    nd_trainer_destroy(trainer);
    return status == ND_OK ? print_changes(&t) : status;
}
