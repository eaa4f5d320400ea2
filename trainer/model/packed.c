// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/packed.h"

#include <stdlib.h>

#include "runtime/base/math.h"

enum { ALIGNMENT = 256 };

nd_status nd_packed_init(nd_packed_weights *p, const nd_fsdp *fsdp, int64_t tiles)
{
    const int64_t most = 2 * (fsdp->layout->param_count + tiles);
    *p = (nd_packed_weights){.fsdp = fsdp, .most = (int)most};
    return ND_ALLOC(most, &p->weights);
}

void nd_packed_fini(nd_packed_weights *p)
{
    free(p->weights);
    *p = (nd_packed_weights){0};
}

int nd_packed_want(nd_packed_weights *p, const nd_unit *unit, nd_form_rule form)
{
    const bool kept = form.maker == ND_FORM_BY_PRODUCT && nd_fsdp_has_own_slot(p->fsdp, unit);
    ND_ASSERT(p->count < p->most);
    p->weights[p->count++] =
        (nd_packed_weight){.head = unit->kind == ND_UNIT_HEAD, .bytes = kept ? form.bytes : 0};
    return p->count;
}

size_t nd_packed_bytes(const nd_packed_weights *p, bool head)
{
    size_t bytes = 0;
    for (int i = 0; i < p->count; i++) {
        const nd_packed_weight *w = &p->weights[i];
        bytes += w->head == head ? nd_round_up_bytes(w->bytes, ALIGNMENT) : 0;
    }
    return bytes;
}

void nd_packed_plan(nd_packed_weights *p, bool head, nd_memplan *plan)
{
    const char *name = head ? "head, packed" : "decoder blocks, packed";
    const int want = nd_memplan_want(plan, ND_MEM_WEIGHTS, name, nd_packed_bytes(p, head), NULL);
    size_t offset = 0;
    for (int i = 0; i < p->count; i++) {
        nd_packed_weight *w = &p->weights[i];
        if (w->head == head && w->bytes > 0) {
            nd_memplan_also(plan, want, offset, &w->form.memory);
            offset += nd_round_up_bytes(w->bytes, ALIGNMENT);
        }
    }
}

nd_kept_form *nd_packed_form(nd_packed_weights *p, int number)
{
    nd_packed_weight *w = number > 0 && number <= p->count ? &p->weights[number - 1] : NULL;
    if (!w || !w->form.memory) {
        return NULL;
    }
    w->form.made = w->form.made && w->version == p->fsdp->version;
    w->version = p->fsdp->version;
    return &w->form;
}
