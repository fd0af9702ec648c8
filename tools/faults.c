/* Lets the n-th call of a kind below a folder fail with an error of the system (LD_PRELOAD). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char kind[16];
static char folder[PATH_MAX];
static int number, left, count;

/* The n-th call of that kind fails with the error, and every later one; n = 0 only counts. */
void faults_arm(const char *call, const char *below, int error, int n) {
    strncpy(kind, call, sizeof kind - 1);
    strncpy(folder, below, sizeof folder - 1);
    number = error;
    left = n;
    count = 0;
}
int faults_count(void) { return count; }

static int fails(const char *call, const char *path) {
    if (!kind[0] || strcmp(call, kind) || strncmp(path, folder, strlen(folder))) return 0;
    if (++count < left || !left) return 0;
    errno = number;
    return 1;
}
static int fails_at(const char *call, int descriptor) {
    char link[64], path[PATH_MAX];
    if (!kind[0] || strcmp(call, kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}
static int fails_named(const char *call, const char *path) {
    char whole[2 * PATH_MAX];
    if (!kind[0] || strcmp(call, kind)) return 0;
    if (path[0] == '/') return fails(call, path);
    if (!getcwd(whole, PATH_MAX)) return 0;
    strcat(strcat(whole, "/"), path);
    return fails(call, whole);
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int d, const void *b, size_t n) {
    if (fails_at("write", d)) return -1;
    return REAL(ssize_t, write, int, const void *, size_t)(d, b, n);
}
ssize_t pwrite64(int d, const void *b, size_t n, off64_t at) {
    if (fails_at("write", d)) return -1;
    return REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t)(d, b, n, at);
}
ssize_t read(int d, void *b, size_t n) {
    if (fails_at("read", d)) return -1;
    return REAL(ssize_t, read, int, void *, size_t)(d, b, n);
}
ssize_t pread64(int d, void *b, size_t n, off64_t at) {
    if (fails_at("read", d)) return -1;
    return REAL(ssize_t, pread64, int, void *, size_t, off64_t)(d, b, n, at);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (fails_named(flags & (O_WRONLY | O_RDWR) ? "create" : "open", path)) return -1;
    return REAL(int, open64, const char *, int, ...)(path, flags, mode);
}
int rename(const char *from, const char *to) {
    if (fails_named("rename", to)) return -1;
    return REAL(int, rename, const char *, const char *)(from, to);
}
int mkdir(const char *path, mode_t mode) {
    if (fails_named("mkdir", path)) return -1;
    return REAL(int, mkdir, const char *, mode_t)(path, mode);
}
