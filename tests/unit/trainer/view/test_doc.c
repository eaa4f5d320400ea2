// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/doc.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static char *text;
static size_t size;
static nd_doc doc;

static void begin(nd_doc_kind kind)
{
    doc = (nd_doc){.out = open_memstream(&text, &size), .kind = kind};
    cr_assert_not_null(doc.out);
}

static const char *end(void)
{
    cr_assert_eq(fclose(doc.out), 0);
    return text;
}

static const char nasty[] = "<b a=\"'&\">|*_`[x](y)\\ \x1b[31m\xff\xe2\x80\xae\n";

Test(doc, text_cannot_become_markup_of_html)
{
    begin(ND_DOC_HTML);
    nd_doc_text(&doc, nasty);
    cr_assert_str_eq(end(), "&lt;b a=&quot;&#39;&amp;&quot;&gt;|*_`[x](y)\\ \\x1b[31m\\xff\\u202e"
                            "\\x0a");
    free(text);
}

Test(doc, text_cannot_become_markup_of_markdown)
{
    begin(ND_DOC_MARKDOWN);
    nd_doc_text(&doc, nasty);
    cr_assert_str_eq(end(), "&lt;b a=\"'&amp;\"&gt;\\|\\*\\_\\`\\[x\\](y)\\\\ \\\\x1b\\[31m\\\\xff"
                            "\\\\u202e\\\\x0a");
    free(text);
}

Test(doc, text_cannot_leave_a_string_of_json)
{
    begin(ND_DOC_HTML);
    nd_doc_json_text(doc.out, "</script>\"\\&\n\xff\xc3\xa9");
    cr_assert_str_eq(end(), "\\u003c/script\\u003e\\u0022\\u005c\\u0026\\u000a\\ufffd\xc3\xa9");
    free(text);
}

static void write_table(nd_doc_kind kind)
{
    static const char *const heads[] = {"what", "x<y"};
    begin(kind);
    nd_doc_table_begin(&doc, false, 2, heads);
    nd_doc_row_begin(&doc);
    nd_doc_cell(&doc, "a");
    nd_doc_cellf(&doc, "%d", 7);
    nd_doc_row_end(&doc);
    nd_doc_table_end(&doc);
    end();
}

Test(doc, a_table_in_both_forms)
{
    write_table(ND_DOC_HTML);
    cr_assert_str_eq(text, "<div class=\"scroll\"><table>\n<thead><tr><th>what</th><th>x&lt;y</th>"
                           "</tr></thead>\n<tbody>\n<tr><th scope=\"row\">a</th><td>7</td></tr>\n"
                           "</tbody></table></div>\n");
    free(text);
    write_table(ND_DOC_MARKDOWN);
    cr_assert_str_eq(text, "| what | x&lt;y |\n|---|---:|\n| a | 7 |\n\n");
    free(text);
}

Test(doc, a_long_code_is_whole)
{
    char *code = malloc(5001);
    cr_assert_not_null(code);
    memset(code, 'x', 5000);
    code[5000] = '\0';
    begin(ND_DOC_HTML);
    nd_doc_code(&doc, code);
    end();
    cr_assert_eq(size, 5000 + strlen("<pre>\n</pre>\n"));
    cr_assert_not_null(strstr(text, code));
    free(text);
    free(code);
}
