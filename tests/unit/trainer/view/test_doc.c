// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static const char nasty[] = "<b a=\"'&\">|*_`[x](y)\\ \x1b[31m\xff\xe2\x80\xae\n";
static nd_doc doc;

static void begin(void)
{
    doc.blocks = json_array();
}

static void end(void)
{
    json_decref(doc.blocks);
}

TestSuite(doc, .init = begin, .fini = end);

static char *markdown_of(const json_t *blocks)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    cr_assert(out && blocks);
    nd_doc_write_markdown(blocks, out);
    cr_assert_eq(fclose(out), 0);
    return text;
}

Test(doc, bytes_that_a_reader_does_not_see_are_shown)
{
    json_t *cell = nd_cell("%s", nasty);
    cr_assert_str_eq(json_string_value(cell), "<b a=\"'&\">|*_`[x](y)\\ \\x1b[31m\\xff\\u202e\\n");
    json_decref(cell);
}

Test(doc, text_cannot_become_markup_of_markdown)
{
    nd_doc_say(&doc, "%s", nasty);
    char *text = markdown_of(doc.blocks);
    cr_assert_str_eq(text, "&lt;b a=\"'&amp;\"&gt;\\|\\*\\_\\`\\[x\\](y)\\\\ \\\\x1b\\[31m\\\\xff"
                           "\\\\u202e\\\\n\n\n");
    free(text);
}

Test(doc, a_table_is_markdown)
{
    nd_doc_table(&doc, false, "what|x<y");
    nd_doc_head(&doc, "share");
    ND_DOC_ROW(&doc, nd_cell("a"), nd_cell_figure(12345, 4), nd_cell_share(0.125));
    char *text = markdown_of(doc.blocks);
    cr_assert_str_eq(text,
                     "| what | x&lt;y | share |\n|---|---:|---:|\n| a | 12.35 k | 12.5 % |\n\n");
    free(text);
}

Test(doc, a_long_code_is_whole)
{
    char *code = malloc(5001);
    cr_assert_not_null(code);
    memset(code, 'x', 5000);
    code[5000] = '\0';
    nd_doc_add(&doc, "code", code);
    char *text = markdown_of(doc.blocks);
    cr_assert_not_null(strstr(text, code));
    free(text);
    free(code);
}
