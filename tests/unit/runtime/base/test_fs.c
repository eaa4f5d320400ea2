// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "tests/support/printed.h"
#include "tests/support/synced.h"
#include "tests/support/tempdir.h"

static tempdir dir;
static int rename_code; /* the errno with which renameat2 fails; 0: it does not fail */

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    errno = rename_code;
    return rename_code ? -1 : (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

static int calls; /* how many further calls of pread and pwrite are hindered */

/* A signal interrupts every other call (true); the ones between move two bytes at most. */
static bool hinder(size_t *size)
{
    if (calls > 0 && --calls % 2 == 1) {
        errno = EINTR;
        return true;
    }
    *size = calls > 0 && *size > 2 ? 2 : *size;
    return false;
}

ssize_t pread(int fd, void *out, size_t size, off_t offset)
{
    return hinder(&size) ? -1 : syscall(SYS_pread64, fd, out, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return hinder(&size) ? -1 : syscall(SYS_pwrite64, fd, data, size, offset);
}

/* Modes do not depend on the shell that starts the test. */
static void setup(void)
{
    umask(0022);
}

TEMPDIR_SUITE(fs, setup);

/* But for a byte order mark. */
Test(fs, read_gives_the_whole_file_with_a_terminator)
{
    static const struct {
        const char *bytes;
        size_t count, mark; /* mark: of these bytes */
    } files[] = {{"ab\0c", 4, 0},
                 {"", 0, 0},
                 {"\xef\xbb\xbf{}", 5, 3},
                 {"\xef\xbb\xbf", 3, 3},
                 {"\xef\xbb", 2, 0}};
    char *text;
    size_t size;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        const char *path = tempdir_write(&dir, "a", files[i].bytes, files[i].count);
        assert_ok(nd_fs_read(path, files[i].count, ND_ERR_DATA, &text, &size));
        cr_assert_eq(size, files[i].count - files[i].mark);
        cr_expect_eq(memcmp(text, files[i].bytes + files[i].mark, size + 1), 0, "file %zu", i);
        free(text);
    }
    assert_fails(nd_fs_read(tempdir_write(&dir, "b", "abcd", 4), 3, ND_ERR_CONFIG, &text, &size),
                 ND_ERR_CONFIG, "has 4 bytes, and at most 3");
}

Test(fs, what_is_not_a_file_is_refused_with_the_callers_status)
{
    char *text;
    size_t size;
    nd_fs_map map;
    assert_fails(nd_fs_read(dir.path, 9, ND_ERR_CONFIG, &text, &size), ND_ERR_CONFIG,
                 "is a folder");
    assert_fails(nd_fs_map_open(dir.path, ND_ERR_DATA, &map), ND_ERR_DATA, "is a folder");
    assert_fails(nd_fs_read(tempdir_file(&dir, "none"), 9, ND_ERR_CONFIG, &text, &size),
                 ND_ERR_CONFIG, strerror(ENOENT));
    const char *fifo = tempdir_file(&dir, "fifo");
    cr_assert_eq(mkfifo(fifo, 0600), 0);
    assert_fails(nd_fs_read(fifo, 9, ND_ERR_DATA, &text, &size), ND_ERR_DATA, "pipe"); /* at once */
}

/* Folders of this name, and those above it. */
static void make_folder(const char *name)
{
    assert_ok(nd_fs_make_folders(tempdir_file(&dir, name), "the folder", ""));
}

static int matches(const char *pattern)
{
    nd_fs_names names;
    assert_ok(nd_fs_glob(tempdir_file(&dir, pattern), &names));
    const int count = names.count;
    nd_fs_names_fini(&names);
    return count;
}

Test(fs, two_stars_stand_for_folders)
{
    char deep[128] = "deep";
    make_folder("a/b");
    make_folder(".hidden");
    tempdir_write(&dir, "0.jsonl", "", 0);
    tempdir_write(&dir, "a/1.jsonl", "", 0);
    tempdir_write(&dir, "a/b/2.jsonl", "", 0);
    tempdir_write(&dir, "a/b/2.txt", "", 0);
    tempdir_write(&dir, ".hidden/3.jsonl", "", 0);
    cr_assert_eq(symlink(dir.path, tempdir_file(&dir, "a/loop")), 0);
    cr_expect_eq(matches("**/*.jsonl"), 3);
    cr_expect_eq(matches("*/**/*.jsonl"), 2);
    cr_expect_eq(matches("a/**/2.*"), 2);
    cr_expect_eq(matches("a/**"), 5, "1.jsonl, b, loop, and two below b: %d", matches("a/**"));
    cr_expect_eq(matches("none/**/*"), 0);
    make_folder("a/set[1]*\\");
    make_folder("a/set1x");
    tempdir_write(&dir, "a/set[1]*\\/3.csv", "", 0);
    tempdir_write(&dir, "a/set1x/4.csv", "", 0);
    cr_expect_eq(matches("**/*.csv"), 2, "names of folders are no patterns");
    cr_expect_eq(matches("a**/*.jsonl"), 1, "stars within a name are those of the shell");
    nd_fs_names names;
    assert_fails(nd_fs_glob(tempdir_file(&dir, "**/a/**"), &names), ND_ERR_CONFIG, "** twice");
    cr_assert_eq(chdir(dir.path), 0);
    assert_ok(nd_fs_glob("**/2.txt", &names));
    cr_assert_eq(names.count, 1);
    cr_expect_str_eq(names.list[0], "a/b/2.txt");
    nd_fs_names_fini(&names);
    for (int i = 0; i < 33; i++) {
        strcat(deep, "/d");
    }
    make_folder(deep);
    assert_fails(nd_fs_glob(tempdir_file(&dir, "deep/**"), &names), ND_ERR_CONFIG, "too deep");
}

/* Whatever reads it, and as any version of git-lfs and any editor left it. */
Test(fs, a_git_lfs_pointer_is_told)
{
    static const char *const pointers[] = {
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 268435456\n",
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 268435456",
        "version https://git-lfs.github.com/spec/v1\r\noid sha256:4d7a\r\nsize 268435456\r\n",
        "\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n",
        "version https://hawser.github.com/spec/v1\noid sha256:4d7a\nsize 268435456\n",
        "version http://git-media.io/v/2\next-0-a sha256:1\noid sha256:4d7a\nsize 12\n"};
    static const char *const texts[] = {"version https://git-lfs.github.com/spec/v1\nis its name\n",
                                        "The first line is no version\noid sha256:4d7a\nsize 1\n"};
    nd_fs_map map;
    char *text;
    size_t size;
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        const char *path =
            tempdir_write(&dir, "model.safetensors", pointers[i], strlen(pointers[i]));
        assert_fails(nd_fs_read(path, 999, ND_ERR_CONFIG, &text, &size), ND_ERR_CONFIG,
                     "git lfs pull");
        assert_fails(nd_fs_map_open(path, ND_ERR_DATA, &map), ND_ERR_DATA,
                     "model.safetensors\" is a Git LFS pointer");
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *path = tempdir_write(&dir, "a", texts[i], strlen(texts[i]));
        assert_ok(nd_fs_read(path, 999, ND_ERR_CONFIG, &text, &size));
        free(text);
    }
}

Test(fs, map_of_a_file_and_of_an_empty_one)
{
    nd_fs_map map;
    assert_ok(nd_fs_map_open(tempdir_write(&dir, "a", "hello", 5), ND_ERR_DATA, &map));
    cr_assert_eq(map.size, 5);
    cr_assert_eq(memcmp(map.data, "hello", 5), 0);
    nd_fs_map_prefetch(&map, 3, 100);
    nd_fs_map_prefetch(&map, 5, 1);
    nd_fs_map_close(&map);
    cr_assert_null(map.data);
    assert_ok(nd_fs_map_open(tempdir_write(&dir, "b", "", 0), ND_ERR_DATA, &map));
    cr_assert_eq(map.size, 0);
    nd_fs_map_prefetch(&map, 0, 1);
    nd_fs_map_close(&map);
}

static void expect_text(const char *name, const char *expected)
{
    char *text;
    size_t size;
    assert_ok(nd_fs_read(tempdir_file(&dir, name), 4096, ND_ERR_DATA, &text, &size));
    cr_expect_str_eq(text, expected, "%s: %s", name, text);
    free(text);
}

static mode_t mode(const char *name)
{
    struct stat st;
    cr_assert_eq(stat(tempdir_file(&dir, name), &st), 0);
    return st.st_mode & 0777;
}

/* Number of files in the test's folder. */
static int file_count(void)
{
    nd_fs_names names;
    assert_ok(nd_fs_list(dir.path, &names));
    const int count = names.count;
    nd_fs_names_fini(&names);
    return count;
}

Test(fs, atomic_write_replaces_or_leaves_alone)
{
    const char *path = tempdir_file(&dir, "a.json");
    assert_ok(nd_fs_write_atomic(path, "first", 5));
    assert_ok(nd_fs_write_atomic(path, "second", 6));
    cr_expect_str_eq(synced, dir.path, "a loss of power would leave the old file");
    cr_expect_eq(mode("a.json"), 0644, "others may read it");
    nd_fs_draft draft = {.is_new = true};
    assert_fails(nd_fs_draft_close(&draft, nd_fs_draft_open(&draft, path, 0666)), ND_ERR_CANTCREATE,
                 "File exists");
    sync_code = EINVAL; /* as file systems say that cannot make a folder durable */
    assert_ok(nd_fs_sync_folder(dir.path));
    assert_fails(nd_fs_write_atomic(path, "third", 5), ND_ERR_CANTCREATE,
                 "could not be made durable");
    sync_code = 0;
    expect_text("a.json", "second");

    /* A file-size limit stands in for a full disk. */
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit small = {1000, 1000};
    char large[5000] = {0};
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_fails(nd_fs_write_atomic(path, large, sizeof large), ND_ERR_CANTCREATE,
                 "failed at byte 1000: File too large");
    expect_text("a.json", "second");
    cr_assert_eq(file_count(), 1, "the temporary file is still there");
    assert_fails(nd_fs_write_atomic("/proc/nothing/x", "x", 1), ND_ERR_CANTCREATE,
                 "cannot write \"/proc/nothing/x\"");
}

Test(fs, paths_are_as_long_as_the_system_takes_them)
{
    char name[PATH_MAX] = "", path[PATH_MAX];
    memset(name, 'n', sizeof name - 1);
    assert_ok(nd_fs_path(path, "%s", name));
    cr_assert_str_eq(path, name);
    assert_fails(nd_fs_path(path, "%s/", name), ND_ERR_DATA, "is too long");
}

Test(fs, full_device_is_cantcreate)
{
    int fd = open("/dev/full", O_WRONLY);
    cr_assert_geq(fd, 0);
    assert_fails(nd_fs_pwrite(fd, "x", "abc", 3, 0), ND_ERR_CANTCREATE, strerror(ENOSPC));
    close(fd);
}

Test(fs, partial_and_interrupted_calls_are_repeated)
{
    char text[16] = "";
    int fd = open(tempdir_write(&dir, "a", "It", 2), O_RDWR);
    calls = 8;
    assert_ok(nd_fs_pwrite(fd, "a", " is so.", 7, 2));
    expect_text("a", "It is so.");
    calls = 8;
    assert_ok(nd_fs_pread(fd, "a", text, 7, 2));
    cr_expect_str_eq(text, " is so.");
    cr_expect_eq(calls, 0);
    close(fd);
}

Test(fs, a_file_that_ends_early_is_an_io_error)
{
    char buffer[8];
    int fd = open(tempdir_write(&dir, "a", "hello", 5), O_RDONLY);
    assert_ok(nd_fs_pread(fd, "a", buffer, 3, 2));
    assert_fails(nd_fs_pread(fd, "a", buffer, 4, 2), ND_ERR_IO, "\"a\" ended at byte 5");
    close(fd);
}

Test(fs, free_space_preflight_shows_both_numbers)
{
    assert_ok(nd_fs_check_space(dir.path, 1, "a byte"));
    assert_fails(nd_fs_check_space(dir.path, UINT64_C(1) << 60, "an exabyte"), ND_ERR_CANTCREATE,
                 "an exabyte needs 1152921.5 TB");
    assert_fails(nd_fs_check_space("/proc", 1, "the run folder"), ND_ERR_CANTCREATE,
                 "the run folder cannot be written in \"/proc\"");
    assert_fails(nd_fs_check_space("/nowhere/at/all", 1, "x"), ND_ERR_CANTCREATE,
                 "there is no such folder; make it, or write elsewhere");
}

static uint64_t free_bytes(void)
{
    struct statvfs fs;
    cr_assert_eq(statvfs(dir.path, &fs), 0);
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

/* Others use the file system too, so what they changed much meanwhile is looked at again. */
Test(fs, what_lies_there_already_needs_no_free_space)
{
    enum { PART = 64 << 20, MARGIN = 32 << 20, ATTEMPTS = 100 };
    const char *const no_folder = "/nowhere/at/all";
    bool calm = false;
    int fd = open(tempdir_write(&dir, "part", "x", 1), O_WRONLY);
    cr_assert_eq(posix_fallocate(fd, 0, PART), 0);
    close(fd);
    for (int i = 0; i < ATTEMPTS && !calm; i++) {
        uint64_t before = free_bytes(), bytes = before + MARGIN;
        nd_status missing = nd_fs_check_space_left(dir.path, no_folder, bytes, "a checkpoint");
        nd_status begun = nd_fs_check_space_left(dir.path, dir.path, bytes, "a checkpoint");
        nd_status more = nd_fs_check_space_left(dir.path, dir.path, bytes + PART, "a checkpoint");
        uint64_t after = free_bytes(), change = after > before ? after - before : before - after;
        calm = change < MARGIN / 4;
        cr_assert(!calm || missing == ND_ERR_CANTCREATE, "a missing folder counts");
        cr_assert(!calm || begun == ND_OK, "what is there does not count");
        cr_assert(!calm || more == ND_ERR_CANTCREATE, "what is there counts twice");
    }
    nd_error_clear();
}

Test(fs, parent_of_a_path)
{
    static const char *const cases[][2] = {{"a/b/c", "a/b"}, {"a", "."},    {"/a", "/"},
                                           {"a/b/", "a"},    {"a//b", "a"}, {"/", "/"},
                                           {"a/", "."},      {"/a//", "/"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *parent;
        assert_ok(nd_fs_parent(cases[i][0], &parent));
        cr_assert_str_eq(parent, cases[i][1], "of %s: %s", cases[i][0], parent);
        free(parent);
    }
}

/* XXH3 of no bytes, its lowest byte first; FIPS 180-2, "abc". */
Test(fs, checksums_have_known_answers)
{
    char hex[ND_HASH_HEX_MAX];
    uint64_t halves[2];
    assert_ok(nd_hash_text(ND_HASH_XXH3_64, "", 0, hex));
    cr_expect_str_eq(hex, "c294d3380580062d");
    nd_hash_128("", 0, halves);
    cr_expect(nd_hash_64("", 0) == 0x2d06800538d394c2 && halves[0] == 0x6001c324468d497f);
    assert_ok(nd_sha256("abc", 3, hex));
    cr_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

Test(fs, make_folders_makes_all_and_names_what_fails)
{
    make_folder("a/b/c");
    cr_assert(tempdir_has_path(dir.name));
    cr_expect_str_eq(synced, tempdir_file(&dir, "a/b"), "a loss of power would take the folder");
    make_folder("a/b/c"); /* it may be there */
    cr_expect_eq(mode("a"), 0755);
    make_folder(printed("%0*d", NAME_MAX, 0));
    const char *too_long = tempdir_file(&dir, printed("%0*d", NAME_MAX + 1, 0));
    assert_fails(nd_fs_make_folders(too_long, "the folder", ""), ND_ERR_CANTCREATE,
                 strerror(ENAMETOOLONG));
    tempdir_write(&dir, "file", "", 0);
    assert_fails(nd_fs_make_folders(tempdir_file(&dir, "file/b"), "the folder", "Choose another"),
                 ND_ERR_CANTCREATE, "/file/b");
    cr_assert_not_null(strstr(nd_error_last()->message, "Choose another"));
}

Test(fs, a_rename_overwrites_nothing)
{
    const char *to = printed("%s", tempdir_write(&dir, "to", "2", 1));
    static const int codes[] = {0, EINVAL, ENOSYS}; /* also where the kernel cannot see to that */
    for (int i = 0; i < 3; i++) {
        rename_code = codes[i];
        assert_fails(nd_fs_rename(tempdir_write(&dir, "from", "1", 1), to), ND_ERR_CANTCREATE,
                     strerror(EEXIST));
        expect_text("to", "2");
        expect_text("from", "1");
    }
    cr_assert_eq(unlink(to), 0);
    make_folder("former");
    assert_ok(nd_fs_rename(tempdir_write(&dir, "former/name", "3", 1), to));
    rename_code = 0;
    cr_expect_str_eq(synced, dir.path, "a loss of power would take the new name");
    sync_code = EIO;
    assert_fails(nd_fs_rename(to, tempdir_file(&dir, "newer")), ND_ERR_CANTCREATE, "made durable");
    sync_code = 0;
    expect_text("to", "3");
    cr_expect_eq(nd_fs_rename_new(tempdir_file(&dir, "none"), to), ENOENT);
}

Test(fs, what_is_set_aside_gets_a_name_that_is_free)
{
    char *aside = NULL;
    assert_ok(nd_fs_set_aside(tempdir_write(&dir, "a", "1", 1), dir.name, "old", &aside));
    cr_expect_str_eq(aside, tempdir_file(&dir, "a.old"));
    free(aside);
    assert_ok(nd_fs_set_aside(tempdir_write(&dir, "a", "2", 1), dir.name, "old", NULL));
    assert_ok(nd_fs_set_aside(tempdir_write(&dir, "a", "3", 1), dir.name, "old", NULL));
    expect_text("a.old", "1");
    expect_text("a.old-2", "2");
    expect_text("a.old-3", "3");
    assert_fails(nd_fs_set_aside(tempdir_file(&dir, "a"), dir.name, "old", &aside),
                 ND_ERR_CANTCREATE, "cannot rename");
}

static nd_fs_kind look(const char *name, bool follows)
{
    nd_fs_kind kind = ND_FS_OTHER;
    const char *path = tempdir_file(&dir, name);
    assert_ok(follows ? nd_fs_look(path, &kind, NULL) : nd_fs_look_at_link(path, &kind, NULL));
    return kind;
}

Test(fs, kinds_are_told_apart_and_an_error_is_no_absence)
{
    nd_fs_kind kind;
    bool is = true;
    tempdir_write(&dir, "file", "", 0);
    cr_assert_eq(symlink("file", tempdir_file(&dir, "link")), 0);
    cr_assert_eq(symlink("nowhere", tempdir_file(&dir, "dangling")), 0);
    cr_assert_eq(symlink("loop", tempdir_file(&dir, "loop")), 0);
    cr_assert_eq(mkfifo(tempdir_file(&dir, "fifo"), 0600), 0);
    cr_expect_eq(look("file", true), ND_FS_FILE);
    cr_expect_eq(look(".", true), ND_FS_FOLDER);
    cr_expect_eq(look("fifo", true), ND_FS_OTHER);
    cr_expect_eq(look("link", true), ND_FS_FILE);
    cr_expect_eq(look("link", false), ND_FS_LINK);
    cr_expect_eq(look("dangling", true), ND_FS_ABSENT);
    cr_expect_eq(look("dangling", false), ND_FS_LINK);
    cr_expect_eq(look("none", true), ND_FS_ABSENT);
    cr_expect_eq(look("file/below", true), ND_FS_ABSENT);
    assert_fails(nd_fs_look(tempdir_file(&dir, "loop"), &kind, NULL), ND_ERR_IO, "loop\"");
    assert_ok(nd_fs_exists(tempdir_file(&dir, "dangling"), &is));
    cr_expect(is);
    assert_ok(nd_fs_is_folder(tempdir_file(&dir, "file"), &is));
    cr_expect_not(is);
}

Test(fs, a_list_has_all_names_in_order_or_is_an_error)
{
    nd_fs_names names;
    for (int i = 12; i > 0; i--) {
        tempdir_write(&dir, printed("n-%d", i), "", 0);
    }
    assert_ok(nd_fs_list(dir.path, &names));
    cr_assert_eq(names.count, 12);
    cr_expect(names.there);
    cr_expect_str_eq(names.list[1], "n-2");
    cr_expect_str_eq(names.list[11], "n-12");
    nd_fs_names_fini(&names);
    assert_ok(nd_fs_list(tempdir_file(&dir, "none"), &names));
    cr_expect(names.count == 0 && !names.there);
    cr_assert_eq(symlink("loop", tempdir_file(&dir, "loop")), 0);
    assert_fails(nd_fs_list(tempdir_file(&dir, "loop"), &names), ND_ERR_IO, "loop\"");
    assert_ok(nd_fs_glob(tempdir_file(&dir, "n-1*"), &names));
    cr_expect_eq(names.count, 4);
    nd_fs_names_fini(&names);
    assert_ok(nd_fs_glob(tempdir_file(&dir, "m-*"), &names));
    cr_expect_eq(names.count, 0);
}

/* Whatever somebody else has put under the name stays as it is. */
Test(fs, a_file_of_ours_is_opened_and_made_through_no_link)
{
    static const char *const odd[] = {"link", "fifo"};
    struct stat st;
    int fd = -1;
    cr_assert_eq(symlink("target", tempdir_file(&dir, "link")), 0);
    cr_assert_eq(mkfifo(tempdir_file(&dir, "fifo"), 0600), 0);
    for (int there = 0; there < 2; there++) { /* what the link leads to */
        if (there) {
            tempdir_write(&dir, "target", "1", 1);
        }
        for (int i = 0; i < 2; i++) {
            const char *path = tempdir_file(&dir, odd[i]);
            cr_expect_eq(nd_fs_update(path, 0), -1, "%s", odd[i]);
            cr_expect_eq(errno, i == 0 ? ELOOP : ENXIO);
            cr_expect_eq(nd_fs_create(path, 0600), -1, "%s", odd[i]);
            cr_expect_eq(errno, EEXIST);
            cr_expect_eq(nd_fs_open_own(path, ND_ERR_DATA, &fd, NULL), ND_ERR_DATA);
        }
        cr_expect_eq(tempdir_has_path(tempdir_file(&dir, "target")), there);
    }
    assert_ok(nd_fs_open(tempdir_file(&dir, "link"), ND_ERR_DATA, &fd, &st)); /* a user's data */
    cr_expect_eq(st.st_size, 1);
    close(fd);
}

Test(fs, a_file_that_has_another_name_is_not_updated)
{
    tempdir_write(&dir, "elsewhere", "1", 1);
    const char *name = printed("%s", tempdir_file(&dir, "name"));
    cr_assert_eq(link(tempdir_file(&dir, "elsewhere"), name), 0);
    cr_expect_eq(nd_fs_update(name, 0), -1);
    cr_expect_eq(errno, EMLINK);
    cr_assert_eq(unlink(name), 0);
    const int fd = nd_fs_update(tempdir_file(&dir, "elsewhere"), 0);
    cr_expect_geq(fd, 0);
    close(fd);
}

Test(fs, a_folder_of_ours_is_made_through_no_link)
{
    const char *own = tempdir_file(&dir, "own");
    assert_ok(nd_fs_make_own_folder(own));
    assert_ok(nd_fs_make_own_folder(own));
    cr_expect_eq(mode("own"), 0755);
    cr_assert_eq(symlink("own", tempdir_file(&dir, "link")), 0);
    assert_fails(nd_fs_make_own_folder(tempdir_file(&dir, "link")), ND_ERR_CANTCREATE,
                 "it is a link");
    cr_assert_eq(mkfifo(tempdir_file(&dir, "fifo"), 0600), 0);
    assert_fails(nd_fs_make_own_folder(tempdir_file(&dir, "fifo")), ND_ERR_CANTCREATE, "fifo");
}

static bool is_any(const char *name)
{
    return nd_fs_temporary_of(name) > 0;
}

Test(fs, what_killed_processes_left_is_removed_and_nothing_else)
{
    char *temporary = NULL;
    static const char *const kept[] = {"a.tmp-1", "a.tmp-1-0123456789abcde",
                                       "a.tmp-x-0123456789abcdef", "a.tmp-1-0123456789abcdef.txt"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        tempdir_write(&dir, kept[i], "", 0);
    }
    assert_ok(nd_fs_temporary(tempdir_file(&dir, "model.tmp-1"), &temporary));
    cr_assert_eq(mkdir(temporary, 0700), 0);
    cr_assert_eq(chdir(temporary), 0);
    cr_assert(mkdir("inner", 0700) == 0 && mkdir("inner/most", 0700) == 0);
    cr_assert_eq(symlink(dir.path, "inner/most/link"), 0); /* which is not followed */
    cr_assert_eq(chdir("/"), 0);
    cr_expect_eq(nd_fs_temporary_of(strrchr(temporary, '/') + 1), strlen("model.tmp-1"));
    assert_ok(nd_fs_remove_left(dir.path, is_any));
    cr_expect_not(tempdir_has_path(temporary));
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        cr_expect(tempdir_has_path(tempdir_file(&dir, kept[i])), "%s", kept[i]);
    }
    free(temporary);
}

/* A failing device, or a process without descriptors, says nothing of the place to write to. */
Test(fs, a_failed_question_is_no_refusal)
{
    const int unknown[] = {EIO, ESTALE, EMFILE, ENFILE},
              refused[] = {EACCES, EROFS, ENOSPC, ENOENT},
              wrong[] = {ENOTDIR, ENAMETOOLONG, ELOOP, ENXIO};
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(nd_fs_blame_write(unknown[i]), ND_ERR_IO, "%d", unknown[i]);
        cr_expect_eq(nd_fs_blame_write(refused[i]), ND_ERR_CANTCREATE, "%d", refused[i]);
        cr_expect_eq(nd_fs_blame(unknown[i], ND_ERR_DATA), ND_ERR_IO, "%d", unknown[i]);
        cr_expect_eq(nd_fs_blame(wrong[i], ND_ERR_DATA), ND_ERR_DATA, "%d", wrong[i]);
    }
}
