// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/memplan.h"

#include <string.h>

enum { ALIGNMENT = 256 };

static const size_t LARGE_BYTES = (size_t)10 << 30; /* a plan is printed in GiB from here on */

static const char *const class_names[ND_MEM_CLASS_COUNT] = {
    "state",
    "gathered weights",
    "unsharded gradients",
    "activations",
    "scratch",
    "head",
    "communication",
    "data",
};

const char *nd_mem_class_name(nd_mem_class class)
{
    return class_names[class];
}

void nd_memplan_init(nd_memplan *plan)
{
    memset(plan, 0, sizeof *plan);
}

static nd_mem_segment *append(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes)
{
    ND_ASSERT(plan->count < ND_MEMPLAN_MAX_SEGMENTS && !plan->base);
    nd_mem_segment *s = &plan->segments[plan->count++];
    s->class = class;
    snprintf(s->name, sizeof s->name, "%s", name);
    s->bytes = bytes;
    return s;
}

int nd_memplan_add(nd_memplan *plan, nd_mem_class class, const char *name, int64_t count,
                   size_t element_size)
{
    ND_ASSERT(count >= 0);
    nd_mem_segment *s = append(plan, class, name, (size_t)count * element_size);
    s->offset = plan->total;
    plan->total += (s->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return plan->count - 1;
}

void nd_memplan_add_external(nd_memplan *plan, nd_mem_class class, const char *name, size_t bytes)
{
    append(plan, class, name, bytes)->external = true;
    plan->external += bytes;
}

nd_status nd_memplan_commit(nd_memplan *plan, nd_device *device)
{
    ND_ASSERT(!plan->base);
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
    return ND_OK;
}

void *nd_memplan_at(const nd_memplan *plan, int id)
{
    ND_ASSERT(id >= 0 && id < plan->count && plan->base && !plan->segments[id].external);
    return plan->segments[id].bytes ? (char *)plan->base + plan->segments[id].offset : NULL;
}

void nd_memplan_fini(nd_memplan *plan)
{
    if (plan->base) {
        nd_device_free(plan->device, plan->base, plan->total);
        plan->base = NULL;
    }
}

size_t nd_memplan_class_bytes(const nd_memplan *plan, nd_mem_class class)
{
    size_t bytes = 0;
    for (int i = 0; i < plan->count; i++) {
        bytes += plan->segments[i].class == class ? plan->segments[i].bytes : 0;
    }
    return bytes;
}

void nd_memplan_print(const nd_memplan *plan, FILE *out)
{
    bool large = plan->total + plan->external >= LARGE_BYTES;
    const double unit = large ? 1073741824.0 : 1048576.0;
    const int digits = large ? 3 : 2;
    const char *name = large ? "GiB" : "MiB";
    for (nd_mem_class c = 0; c < ND_MEM_CLASS_COUNT; c++) {
        if (nd_memplan_class_bytes(plan, c) == 0) {
            continue;
        }
        fprintf(out, "  %-22s %12.*f %s\n", class_names[c], digits,
                (double)nd_memplan_class_bytes(plan, c) / unit, name);
        for (int i = 0; i < plan->count; i++) {
            const nd_mem_segment *s = &plan->segments[i];
            if (s->class == c && s->bytes > 0) {
                fprintf(out, "    %-32s %12.*f %s%s\n", s->name, digits, (double)s->bytes / unit,
                        name, s->external ? " (allocated by the library)" : "");
            }
        }
    }
    fprintf(out, "  %-22s %12.*f %s\n", "total", digits,
            (double)(plan->total + plan->external) / unit, name);
}
