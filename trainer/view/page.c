// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/page.h"

#include <math.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "trainer/view/charts.h"
#include "trainer/view/page_assets.h"
#include "trainer/view/sections.h"

const char nd_page_mark[] = "<!-- ndtrain report -->\n";

/* "sha256-<base64>": what the page's rules let run, and nothing else. */
static void write_hash(FILE *out, const char *text)
{
    unsigned char digest[SHA256_DIGEST_LENGTH], base64[4 * ((SHA256_DIGEST_LENGTH + 2) / 3) + 1];
    SHA256((const unsigned char *)text, strlen(text), digest);
    EVP_EncodeBlock(base64, digest, sizeof digest);
    fprintf(out, "'sha256-%s'", (const char *)base64);
}

static void write_title(const nd_page *page, nd_doc *doc)
{
    nd_doc_text(doc, page->runs[0].name);
    if (page->count > 1) {
        char more[64];
        snprintf(more, sizeof more, " and %d more", page->count - 1);
        nd_doc_text(doc, more);
    }
}

static void begin_html(const nd_page *page, nd_doc *doc)
{
    FILE *out = doc->out;
    fputs("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src ",
          out);
    write_hash(out, page_css);
    fputs("; script-src ", out);
    write_hash(out, page_js);
    fputs("\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
          out);
    write_title(page, doc);
    fprintf(out, "</title>\n<style>%s</style></head><body>\n", page_css);
    fputs("<button id=\"theme\" type=\"button\">light or dark</button>\n<h1>", out);
    write_title(page, doc);
    fputs("</h1>\n", out);
}

static void write_verdict(const nd_page *page, nd_doc *doc, const nd_run_view *run)
{
    char text[ND_VERDICT_MAX];
    nd_run_verdict(run, text);
    if (doc->kind == ND_DOC_HTML) {
        bool ended = run->end == ND_RUN_FINISHED || run->end == ND_RUN_STOPPED_EARLY;
        bool early = run->end == ND_RUN_ENDED_EARLY, failed = run->end == ND_RUN_FAILED;
        bool good = ended && !run->lost_lines && isfinite(run->figures.end_loss);
        bool bad = failed || (early && !run->lost_lines) || !isfinite(run->figures.end_loss);
        fprintf(doc->out, "<p class=\"verdict%s\">", good ? " good" : bad ? " bad" : "");
    }
    if (page->count > 1) {
        nd_doc_text(doc, run->name);
        fputs(": ", doc->out);
    }
    nd_doc_text(doc, text);
    fputs(doc->kind == ND_DOC_HTML ? "</p>\n" : "\n\n", doc->out);
}

static nd_status write_runs(const nd_page *page, nd_doc *doc)
{
    for (int i = 0; i < page->count; i++) {
        const nd_run_view *run = &page->runs[i];
        if (page->count > 1) {
            nd_doc_fold_begin(doc, run->folder);
        }
        ND_TRY(nd_sections_run(doc, run, page->count));
        if (page->count > 1) {
            nd_doc_fold_end(doc);
        }
    }
    return ND_OK;
}

nd_status nd_page_write(const nd_page *page, FILE *out)
{
    nd_doc doc = {.out = out, .kind = page->kind};
    char time[ND_CLOCK_UTC_MAX];
    bool html = page->kind == ND_DOC_HTML;
    ND_ASSERT(page->count >= 1 && page->count <= ND_PAGE_RUNS_MAX);
    fputs(nd_page_mark, out);
    if (html) {
        begin_html(page, &doc);
    } else {
        fputs("\n# ", out);
        write_title(page, &doc);
        fputs("\n\n", out);
    }
    for (int i = 0; i < page->count; i++) {
        write_verdict(page, &doc, &page->runs[i]);
    }
    if (html) {
        ND_TRY(nd_charts_write(page, &doc));
    }
    ND_TRY(nd_sections_compare(&doc, page->runs, page->count));
    ND_TRY(write_runs(page, &doc));
    nd_doc_say(&doc, "Written by ndtrain %s at %s.", ND_VERSION, nd_clock_utc(page->now, time));
    if (html) {
        fprintf(out, "<script>%s</script>\n</body></html>\n", page_js);
    }
    return ND_OK;
}
