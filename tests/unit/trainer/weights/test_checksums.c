// SPDX-License-Identifier: Apache-2.0
#include <string.h>
#include <unistd.h>

#include "tests/unit/trainer/weights/hf_model.h"

TestSuite(checksums, .init = hf_setup, .fini = hf_teardown);

static char folder[512];

static void write_model(void)
{
    nd_hf_writer_options options = hf_options_of(false, ND_DTYPE_BF16);
    snprintf(folder, sizeof folder, "%s", hf_write_model("m", &options));
}

static void flip_bit(const char *name, long offset, int bit)
{
    char path[640];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r+b");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fseek(f, offset, offset < 0 ? SEEK_END : SEEK_SET), 0);
    int byte = fgetc(f);
    cr_assert_eq(fseek(f, -1, SEEK_CUR), 0);
    cr_assert_eq(fputc(byte ^ 1 << bit, f), byte ^ 1 << bit);
    cr_assert_eq(fclose(f), 0);
}

static void expect_good(int wanted)
{
    int files = -1;
    assert_ok(nd_checksums_verify(folder, &files));
    cr_expect_eq(files, wanted, "%d files, not %d", files, wanted);
}

static void expect_bad(const char *words)
{
    int files;
    assert_fails(nd_checksums_verify(folder, &files), ND_ERR_DATA, words);
}

Test(checksums, a_saved_model_has_a_list_that_sha256sum_reads)
{
    write_model();
    hf_shell("cd %s && sha256sum --check --strict --quiet SHA256SUMS", folder);
    hf_shell("cd %s && test $(wc -l < SHA256SUMS) = $(ls | grep -vc SHA256SUMS)", folder);
    expect_good(4);
}

Test(checksums, a_list_made_by_sha256sum_is_read)
{
    write_model();
    hf_shell("cd %s && sha256sum --binary config.json model.safetensors > SHA256SUMS", folder);
    expect_good(2);
    hf_shell("cd %s && tr a-f A-F < SHA256SUMS > upper && cut -c 1-64 upper > hex && "
             "cut -c 65- SHA256SUMS > names && paste -d '' hex names > SHA256SUMS",
             folder);
    expect_good(2);
    hf_shell("cd %s && head -c 3000001 /dev/urandom > large && sha256sum large > SHA256SUMS",
             folder); /* more than is read at once */
    expect_good(1);
    flip_bit("large", -1, 0);
    expect_bad("large\" is not the file");
}

/* Single bits of a data section, which safetensors itself takes as it is. */
Test(checksums, every_flipped_bit_is_found)
{
    write_model();
    for (int i = 0; i < 60; i++) {
        flip_bit("model.safetensors", -1 - 97L * i, i % 8);
        expect_bad("model.safetensors\" is not the file that SHA256SUMS of its folder lists");
        flip_bit("model.safetensors", -1 - 97L * i, i % 8);
    }
    expect_good(4);
    flip_bit("config.json", 3, 0);
    expect_bad("config.json\" is not the file");
    expect_bad("remove SHA256SUMS or set model.verify: false (--model-verify false)");
}

Test(checksums, files_that_are_not_listed_do_not_matter)
{
    write_model();
    hf_shell("echo hello > %s/README.md", folder);
    expect_good(4);
    hf_shell("rm %s/tokenizer.json", folder);
    expect_bad("tokenizer.json\" is missing");
    hf_shell("rm %s/SHA256SUMS", folder);
    expect_good(0);
}

Test(checksums, lines_that_are_not_sums_of_files_of_the_folder_are_refused)
{
    static const char *const bad[] = {
        "hello",
        "%064d",
        "%064d  ",
        "%064d config.json",
        "%064d  ../m/config.json",
        "%064d  ..",
        "%063dx  config.json",
        "\\%064d  config.json",
    };
    write_model();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        hf_shell("cd %s && sha256sum config.json > SHA256SUMS", folder);
        hf_shell("cd %s && printf '%s\\n' 0 >> SHA256SUMS", folder, bad[i]);
        expect_bad("SHA256SUMS\" line 2 is not a SHA-256");
    }
}
