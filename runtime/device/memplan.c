// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/memplan.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

enum { ALIGNMENT = 256 };

static const size_t LARGE_BYTES = (size_t)10 << 30; /* a plan is printed in GiB from here on */

static const char *const class_names[ND_MEM_CLASS_COUNT] = {
    "state",       "gathered weights", "unsharded gradients",
    "activations", "kv cache",         "scratch",
    "head",        "communication",    "data",
};

void nd_memplan_init(nd_memplan *plan)
{
    memset(plan, 0, sizeof *plan);
}

static nd_mem_buffer *append(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes)
{
    ND_ASSERT(plan->count < ND_MEMPLAN_MAX_BUFFERS && !plan->base);
    nd_mem_buffer *s = &plan->buffers[plan->count++];
    s->class = class;
    snprintf(s->name, sizeof s->name, "%s", name);
    s->bytes = bytes;
    return s;
}

void nd_memplan_also(nd_memplan *plan, int want, size_t offset, void *pointer)
{
    ND_ASSERT(want >= 0 && want < plan->count && !plan->base);
    if (plan->pointer_count == plan->pointer_capacity) {
        int capacity = plan->pointer_capacity ? 2 * plan->pointer_capacity : 64;
        nd_mem_pointer *larger = NULL;
        if (plan->status == ND_OK) {
            plan->status = ND_ALLOC(capacity, &larger);
        }
        if (plan->status != ND_OK) {
            return;
        }
        if (plan->pointer_count > 0) {
            memcpy(larger, plan->pointers, (size_t)plan->pointer_count * sizeof *larger);
        }
        free(plan->pointers);
        plan->pointers = larger;
        plan->pointer_capacity = capacity;
    }
    plan->pointers[plan->pointer_count++] = (nd_mem_pointer){pointer, want, offset};
}

int nd_memplan_want(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes,
                    void *pointer)
{
    nd_mem_buffer *s = append(plan, class, name, bytes);
    s->offset = plan->total;
    plan->total += nd_round_up_bytes(s->bytes, ALIGNMENT);
    if (pointer) {
        nd_memplan_also(plan, plan->count - 1, 0, pointer);
    }
    return plan->count - 1;
}

void nd_memplan_add_external(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes)
{
    append(plan, class, name, bytes)->external = true;
    plan->external += bytes;
}

static void fill_pointers(nd_memplan *plan)
{
    for (int i = 0; i < plan->pointer_count; i++) {
        const nd_mem_pointer *p = &plan->pointers[i];
        const nd_mem_buffer *s = &plan->buffers[p->want];
        ND_ASSERT(!s->external && (s->bytes == 0 || p->offset <= s->bytes));
        void *address = s->bytes ? (char *)plan->base + s->offset + p->offset : NULL;
        memcpy(p->to, &address, sizeof address); /* a T *, of whatever T */
    }
    free(plan->pointers);
    plan->pointers = NULL;
    plan->pointer_count = plan->pointer_capacity = 0;
}

nd_status nd_memplan_commit(nd_memplan *plan, nd_device *device)
{
    ND_ASSERT(!plan->base);
    ND_TRY(plan->status);
    plan->device = device;
    nd_status status = nd_device_alloc(device, plan->total, &plan->base);
    if (status != ND_OK) {
        char parts[512] = "";
        size_t used = 0;
        for (nd_mem_class c = 0; c < ND_MEM_CLASS_COUNT && used < sizeof parts; c++) {
            used += (size_t)snprintf(parts + used, sizeof parts - used, "%s%s %.0f MiB",
                                     c ? ", " : "", class_names[c],
                                     (double)nd_memplan_class_bytes(plan, c) / 1048576.0);
        }
        return nd_fail_context(status, "allocating the plan: %s", parts);
    }
    fill_pointers(plan);
    return ND_OK;
}

void nd_memplan_fini(nd_memplan *plan)
{
    if (plan->base) {
        nd_device_free(plan->device, plan->base, plan->total);
        plan->base = NULL;
    }
    free(plan->pointers);
    plan->pointers = NULL;
}

size_t nd_memplan_class_bytes(const nd_memplan *plan, nd_mem_class class)
{
    size_t bytes = 0;
    for (int i = 0; i < plan->count; i++) {
        bytes += plan->buffers[i].class == class ? plan->buffers[i].bytes : 0;
    }
    return bytes;
}

void nd_memplan_print(const nd_memplan *plan, FILE *out)
{
    bool large = plan->total + plan->external >= LARGE_BYTES;
    const double unit = large ? nd_gib : 1048576.0;
    const int digits = large ? 3 : 2;
    const char *name = large ? "GiB" : "MiB";
    for (nd_mem_class c = 0; c < ND_MEM_CLASS_COUNT; c++) {
        if (nd_memplan_class_bytes(plan, c) == 0) {
            continue;
        }
        fprintf(out, "  %-22s %12.*f %s\n", class_names[c], digits,
                (double)nd_memplan_class_bytes(plan, c) / unit, name);
        for (int i = 0; i < plan->count; i++) {
            const nd_mem_buffer *s = &plan->buffers[i];
            if (s->class == c && s->bytes > 0) {
                fprintf(out, "    %-32s %12.*f %s%s\n", s->name, digits, (double)s->bytes / unit,
                        name, s->external ? " (not in the one allocation)" : "");
            }
        }
    }
    fprintf(out, "  %-22s %12.*f %s\n", "total", digits,
            (double)(plan->total + plan->external) / unit, name);
}
