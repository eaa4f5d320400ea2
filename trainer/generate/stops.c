// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/stops.h"

#include "trainer/text/unicode.h"

nd_status nd_stops_add(nd_stops *stops, const char *text)
{
    if (!text[0]) {
        return nd_fail(ND_ERR_CONFIG, "--stop is empty; give the text that ends a result");
    }
    if (nd_utf8_valid((const uint8_t *)text, strlen(text)) != strlen(text)) {
        return nd_fail(ND_ERR_CONFIG, "--stop is not UTF-8, so no text can contain it");
    }
    if (stops->count == ND_STOPS_MAX) {
        return nd_fail(ND_ERR_CONFIG, "there are more than %d of --stop", ND_STOPS_MAX);
    }
    stops->texts[stops->count++] = text;
    return ND_OK;
}

/* Whether the first `size` bytes of `held` end with the text. */
static bool ends_with(const nd_bytes *held, size_t size, const char *text, size_t text_size)
{
    return size >= text_size && memcmp(held->data + size - text_size, text, text_size) == 0;
}

/* Bytes of the longest stop text that ends at `size`; 0: none does. */
static size_t complete_at(const nd_bytes *held, size_t size, const nd_stops *stops)
{
    size_t longest = 0;
    for (int i = 0; i < stops->count; i++) {
        size_t n = strlen(stops->texts[i]);
        longest = n > longest && ends_with(held, size, stops->texts[i], n) ? n : longest;
    }
    return longest;
}

/* Bytes at the end that may be the beginning of a stop text. */
static size_t begun(const nd_bytes *held, const nd_stops *stops)
{
    size_t longest = 0;
    for (int i = 0; i < stops->count; i++) {
        for (size_t n = strlen(stops->texts[i]) - 1; n > longest; n--) {
            longest = ends_with(held, held->count, stops->texts[i], n) ? n : longest;
        }
    }
    return longest;
}

static void drop_given(nd_stop_filter *f)
{
    if (f->given > 0) {
        memmove(f->held.data, f->held.data + f->given, f->held.count - f->given);
    }
    f->held.count -= f->given;
    f->given = 0;
}

nd_status nd_stop_filter_push(nd_stop_filter *f, const nd_stops *stops, const char *text,
                              size_t size, const char **out, size_t *out_size)
{
    drop_given(f);
    const size_t before = f->held.count;
    if (f->stopped) {
        size = 0;
    }
    ND_TRY(nd_bytes_add(&f->held, text, size));
    for (size_t end = before + 1; end <= f->held.count && !f->stopped; end++) {
        size_t n = complete_at(&f->held, end, stops);
        if (n > 0) {
            f->stopped = true;
            f->held.count = end - n;
        }
    }
    f->given = f->stopped ? f->held.count : f->held.count - begun(&f->held, stops);
    *out = (const char *)f->held.data;
    *out_size = f->given;
    return ND_OK;
}

void nd_stop_filter_end(nd_stop_filter *f, const char **out, size_t *out_size)
{
    drop_given(f);
    f->given = f->held.count;
    *out = (const char *)f->held.data;
    *out_size = f->given;
}

void nd_stop_filter_fini(nd_stop_filter *f)
{
    free(f->held.data);
    *f = (nd_stop_filter){0};
}
