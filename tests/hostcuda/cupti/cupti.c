// SPDX-License-Identifier: Apache-2.0
/*
 * A double of CUPTI's activity interface: a test says what ran on the GPU (nd_double_cupti_*), and
 * the double delivers it as the library does, in buffers that it asks the client for, when one is
 * full or is flushed. ND_DOUBLE_CUPTI_FAILS: nothing can be enabled.
 */
#include <cupti.h>
#include <stdlib.h>
#include <string.h>

static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static unsigned char enabled[CUPTI_ACTIVITY_KIND_COUNT];
static uint8_t *buffer;
static size_t buffer_bytes, used, lost;

void nd_double_cupti_kernel(uint64_t begin, uint64_t end, uint32_t stream, const char *name);
void nd_double_cupti_copy(uint64_t begin, uint64_t end, uint32_t stream, int kind, uint64_t bytes);
void nd_double_cupti_fill(uint64_t begin, uint64_t end, uint32_t stream, uint64_t bytes);
void nd_double_cupti_lose(size_t count);

CUptiResult cuptiGetVersion(uint32_t *version)
{
    *version = CUPTI_API_VERSION;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc on_request,
                                           CUpti_BuffersCallbackCompleteFunc on_complete)
{
    request = on_request;
    complete = on_complete;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind)
{
    if (!request || getenv("ND_DOUBLE_CUPTI_FAILS")) {
        return CUPTI_ERROR_NOT_INITIALIZED;
    }
    enabled[kind] = 1;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityFlushPeriod(uint32_t ms)
{
    return ms > 0 ? CUPTI_SUCCESS : CUPTI_ERROR_INVALID_PARAMETER;
}

CUptiResult cuptiActivityFlushAll(uint32_t flag)
{
    if (buffer) {
        uint8_t *full = buffer;
        buffer = NULL;
        complete(NULL, 0, full, buffer_bytes, used);
    }
    return CUPTI_SUCCESS;
}

static size_t size_of(const CUpti_Activity *record)
{
    return record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL ? sizeof(CUpti_ActivityKernel9)
           : record->kind == CUPTI_ACTIVITY_KIND_MEMCPY          ? sizeof(CUpti_ActivityMemcpy5)
                                                                 : sizeof(CUpti_ActivityMemset4);
}

CUptiResult cuptiActivityGetNextRecord(uint8_t *data, size_t valid, CUpti_Activity **record)
{
    uint8_t *next = *record ? (uint8_t *)*record + size_of(*record) : data;
    if (next >= data + valid) {
        return CUPTI_ERROR_MAX_LIMIT_REACHED;
    }
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *dropped)
{
    *dropped = lost;
    lost = 0;
    return CUPTI_SUCCESS;
}

static void add(CUpti_ActivityKind kind, const void *record, size_t bytes)
{
    size_t most_records = 0;
    if (!enabled[kind]) {
        return;
    }
    if (buffer && used + bytes > buffer_bytes) {
        cuptiActivityFlushAll(0);
    }
    if (!buffer) {
        request(&buffer, &buffer_bytes, &most_records);
        used = 0;
    }
    memcpy(buffer + used, record, bytes);
    used += bytes;
}

void nd_double_cupti_kernel(uint64_t begin, uint64_t end, uint32_t stream, const char *name)
{
    CUpti_ActivityKernel9 k = {.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                               .start = begin,
                               .end = end,
                               .streamId = stream,
                               .name = name,
                               .gridX = 132,
                               .gridY = 2,
                               .gridZ = 1,
                               .blockX = 128,
                               .blockY = 1,
                               .blockZ = 1,
                               .registersPerThread = 64,
                               .staticSharedMemory = 1024,
                               .dynamicSharedMemory = 512};
    add(k.kind, &k, sizeof k);
}

void nd_double_cupti_copy(uint64_t begin, uint64_t end, uint32_t stream, int kind, uint64_t bytes)
{
    CUpti_ActivityMemcpy5 c = {.kind = CUPTI_ACTIVITY_KIND_MEMCPY,
                               .start = begin,
                               .end = end,
                               .streamId = stream,
                               .copyKind = (uint8_t)kind,
                               .bytes = bytes};
    add(c.kind, &c, sizeof c);
}

void nd_double_cupti_fill(uint64_t begin, uint64_t end, uint32_t stream, uint64_t bytes)
{
    CUpti_ActivityMemset4 s = {.kind = CUPTI_ACTIVITY_KIND_MEMSET,
                               .start = begin,
                               .end = end,
                               .streamId = stream,
                               .bytes = bytes};
    add(s.kind, &s, sizeof s);
}

void nd_double_cupti_lose(size_t count)
{
    lost = count;
}
