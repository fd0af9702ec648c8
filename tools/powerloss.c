/* Writes down each call by which a process changes what is below a folder (LD_PRELOAD).

   A record is "NAME NUMBER SIZE1 SIZE2 SIZE3\n", two paths and data of those sizes. POWERLOSS_FOLDER
   is the folder, POWERLOSS_LOG the file. Calls of all threads and processes are made one by one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define ALIAS(name, of) __typeof__(of) name __attribute__((alias(#of)))

static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
static int out = -1;
static pid_t owner;

/* The lock of the whole log: one of a process, so that forked processes wait for one another. */
static int locked(short type) {
    struct flock whole = {.l_type = type, .l_whence = SEEK_SET};
    return fcntl(out, F_SETLKW, &whole);
}
static void lock(void) {
    pthread_mutex_lock(&threads);
    if (owner != getpid()) {
        int fd = REAL(int, open64, const char *, int, ...)(getenv("POWERLOSS_LOG"),
                                                          O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        out = fcntl(fd, F_DUPFD_CLOEXEC, 900);
        REAL(int, close, int)(fd);
        owner = getpid();
    }
    if (out < 0 || locked(F_WRLCK)) abort();
}
static void unlock(void) {
    int kept = errno;
    locked(F_UNLCK);
    pthread_mutex_unlock(&threads);
    errno = kept;
}
static void all(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = REAL(ssize_t, write, int, const void *, size_t)(out, at, size);
        if (n <= 0) abort();
        at += n;
        size -= n;
    }
}
static void record(const char *name, long long number, const char *one, const char *two, const void *data,
                   size_t size) {
    char head[128];
    int kept = errno;
    snprintf(head, sizeof head, "%s %lld %zu %zu %zu\n", name, number, strlen(one), strlen(two), size);
    all(head, strlen(head));
    all(one, strlen(one));
    all(two, strlen(two));
    all(data, size);
    errno = kept;
}

static int inside(const char *path) {
    const char *folder = getenv("POWERLOSS_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}
/* Whether a descriptor is of something below the folder that has a name; its path. */
static int of(int fd, char *path) {
    char link[64];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    const char *gone = " (deleted)";
    size_t tail = strlen(gone);
    if ((size_t)length > tail && !strcmp(path + length - tail, gone)) return 0;
    return inside(path);
}
/* The same of a name in a folder that is open. */
static int at(int fd, const char *name, char *path) {
    char folder[PATH_MAX];
    int kept = errno;
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        if (fd == AT_FDCWD) {
            if (!getcwd(folder, PATH_MAX)) return 0;
        } else if (!of(fd, folder)) return 0;
        size_t length = strlen(folder);
        if (length + strlen(name) + 2 > PATH_MAX) abort();
        memcpy(path, folder, length);
        path[length] = '/';
        strcpy(path + length + 1, name);
    }
    errno = kept;
    return inside(path);
}

/* What a script writes down, such as a commit that has been acknowledged. */
void powerloss_note(const char *text) {
    lock();
    record("note", 0, text, "", "", 0);
    unlock();
}

static int opened(int fd, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat found;
    typedef int (*call)(int, const char *, int, ...);
    call real = (call)dlsym(RTLD_NEXT, "openat64");
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !at(fd, name, path))
        return real(fd, name, flags, mode);
    lock();
    int there = !fstatat(fd, name, &found, 0);
    int result = real(fd, name, flags, mode);
    if (result >= 0 && !there) record("create", 0, path, "", "", 0);
    else if (result >= 0 && flags & O_TRUNC) record("truncate", 0, path, "", "", 0);
    unlock();
    return result;
}
#define MODE(flags, mode)                                                                            \
    mode_t mode = 0;                                                                                 \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                             \
        va_list rest;                                                                                \
        va_start(rest, flags);                                                                       \
        mode = va_arg(rest, mode_t);                                                                 \
        va_end(rest);                                                                                \
    }
int open64(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int open(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int openat64(int fd, const char *path, int flags, ...) { MODE(flags, mode) return opened(fd, path, flags, mode); }
int openat(int fd, const char *path, int flags, ...) { MODE(flags, mode) return opened(fd, path, flags, mode); }
int creat64(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Where the next write goes. */
static off64_t place(int fd) {
    int kept = errno;
    off64_t where = lseek64(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    errno = kept;
    return where;
}
ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    if (!of(fd, path)) return real(fd, data, size);
    lock();
    off64_t where = place(fd);
    ssize_t n = real(fd, data, size);
    if (n > 0) record("write", where, path, "", data, n);
    unlock();
    return n;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t where) {
    char path[PATH_MAX];
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    if (!of(fd, path)) return real(fd, data, size, where);
    lock();
    ssize_t n = real(fd, data, size, where);
    if (n > 0) record("write", where, path, "", data, n);
    unlock();
    return n;
}
ALIAS(pwrite, pwrite64);
static void record_parts(off64_t where, const char *path, const struct iovec *parts, ssize_t n) {
    for (int i = 0; n > 0; i++) {
        ssize_t size = (ssize_t)parts[i].iov_len < n ? (ssize_t)parts[i].iov_len : n;
        record("write", where, path, "", parts[i].iov_base, size);
        where += size;
        n -= size;
    }
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    ssize_t (*real)(int, const struct iovec *, int) = dlsym(RTLD_NEXT, "writev");
    if (!of(fd, path)) return real(fd, parts, count);
    lock();
    off64_t where = place(fd);
    ssize_t n = real(fd, parts, count);
    record_parts(where, path, parts, n);
    unlock();
    return n;
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t where) {
    char path[PATH_MAX];
    ssize_t (*real)(int, const struct iovec *, int, off64_t) = dlsym(RTLD_NEXT, "pwritev64");
    if (!of(fd, path)) return real(fd, parts, count, where);
    lock();
    ssize_t n = real(fd, parts, count, where);
    record_parts(where, path, parts, n);
    unlock();
    return n;
}
ALIAS(pwritev, pwritev64);

/* What a call copied within the kernel, read from where it came. */
static void copied(const char *path, off64_t where, int from, off64_t start, ssize_t n) {
    int kept = errno;
    char *data = malloc(n > 0 ? n : 1);
    for (ssize_t done = 0; done < n;) {
        ssize_t more = pread64(from, data + done, n - done, start + done);
        if (more <= 0) abort();
        done += more;
    }
    if (n > 0) record("write", where, path, "", data, n);
    free(data);
    errno = kept;
}
ssize_t sendfile64(int to, int from, off64_t *start, size_t size) {
    char path[PATH_MAX];
    ssize_t (*real)(int, int, off64_t *, size_t) = dlsym(RTLD_NEXT, "sendfile64");
    if (!of(to, path)) return real(to, from, start, size);
    lock();
    off64_t where = place(to), begin = start ? *start : place(from);
    ssize_t n = real(to, from, start, size);
    copied(path, where, from, begin, n);
    unlock();
    return n;
}
ALIAS(sendfile, sendfile64);
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *target, size_t size, unsigned flags) {
    char path[PATH_MAX];
    ssize_t (*real)(int, off64_t *, int, off64_t *, size_t, unsigned) = dlsym(RTLD_NEXT, "copy_file_range");
    if (!of(to, path)) return real(from, start, to, target, size, flags);
    lock();
    off64_t where = target ? *target : place(to), begin = start ? *start : place(from);
    ssize_t n = real(from, start, to, target, size, flags);
    copied(path, where, from, begin, n);
    unlock();
    return n;
}
int ftruncate64(int fd, off64_t size) {
    char path[PATH_MAX];
    int (*real)(int, off64_t) = dlsym(RTLD_NEXT, "ftruncate64");
    if (!of(fd, path)) return real(fd, size);
    lock();
    int result = real(fd, size);
    if (!result) record("truncate", size, path, "", "", 0);
    unlock();
    return result;
}
ALIAS(ftruncate, ftruncate64);
int truncate64(const char *name, off64_t size) {
    char path[PATH_MAX];
    int (*real)(const char *, off64_t) = dlsym(RTLD_NEXT, "truncate64");
    if (!at(AT_FDCWD, name, path)) return real(name, size);
    lock();
    int result = real(name, size);
    if (!result) record("truncate", size, path, "", "", 0);
    unlock();
    return result;
}
ALIAS(truncate, truncate64);
int posix_fallocate64(int fd, off64_t start, off64_t size) {
    char path[PATH_MAX];
    int (*real)(int, off64_t, off64_t) = dlsym(RTLD_NEXT, "posix_fallocate64");
    if (!of(fd, path)) return real(fd, start, size);
    lock();
    int result = real(fd, start, size);
    if (!result) record("allocate", start + size, path, "", "", 0);
    unlock();
    return result;
}
ALIAS(posix_fallocate, posix_fallocate64);
/* What these change is not seen: for the record, there is no rule. */
int fallocate64(int fd, int mode, off64_t start, off64_t size) {
    char path[PATH_MAX];
    if (of(fd, path)) {
        lock();
        record("fallocate", start + size, path, "", "", 0);
        unlock();
    }
    return REAL(int, fallocate64, int, int, off64_t, off64_t)(fd, mode, start, size);
}
ALIAS(fallocate, fallocate64);
void *mmap64(void *where, size_t size, int protection, int flags, int fd, off64_t start) {
    char path[PATH_MAX];
    if (fd >= 0 && protection & PROT_WRITE && flags & MAP_SHARED && of(fd, path)) {
        lock();
        record("mmap", 0, path, "", "", 0);
        unlock();
    }
    return REAL(void *, mmap64, void *, size_t, int, int, int, off64_t)(where, size, protection, flags, fd, start);
}
ALIAS(mmap, mmap64);

static int renamed(int from, const char *one, int to, const char *two, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int (*real)(int, const char *, int, const char *, unsigned) = dlsym(RTLD_NEXT, "renameat2");
    int seen = at(from, one, source);
    if (!(at(to, two, target) || seen)) return real(from, one, to, two, flags);
    lock();
    int result = real(from, one, to, two, flags);
    if (!result) record("rename", flags, source, target, "", 0);
    unlock();
    return result;
}
int rename(const char *one, const char *two) { return renamed(AT_FDCWD, one, AT_FDCWD, two, 0); }
int renameat(int from, const char *one, int to, const char *two) { return renamed(from, one, to, two, 0); }
int renameat2(int from, const char *one, int to, const char *two, unsigned flags) {
    return renamed(from, one, to, two, flags);
}
int linkat(int from, const char *one, int to, const char *two, int flags) {
    char source[PATH_MAX], target[PATH_MAX];
    int (*real)(int, const char *, int, const char *, int) = dlsym(RTLD_NEXT, "linkat");
    int seen = at(from, one, source);
    if (!(at(to, two, target) || seen)) return real(from, one, to, two, flags);
    lock();
    int result = real(from, one, to, two, flags);
    if (!result) record("link", 0, source, target, "", 0);
    unlock();
    return result;
}
int link(const char *one, const char *two) { return linkat(AT_FDCWD, one, AT_FDCWD, two, 0); }
int symlinkat(const char *to, int fd, const char *name) {
    char path[PATH_MAX];
    int (*real)(const char *, int, const char *) = dlsym(RTLD_NEXT, "symlinkat");
    if (!at(fd, name, path)) return real(to, fd, name);
    lock();
    int result = real(to, fd, name);
    if (!result) record("symlink", 0, path, to, "", 0);
    unlock();
    return result;
}
int symlink(const char *to, const char *name) { return symlinkat(to, AT_FDCWD, name); }
int unlinkat(int fd, const char *name, int flags) {
    char path[PATH_MAX];
    int (*real)(int, const char *, int) = dlsym(RTLD_NEXT, "unlinkat");
    if (!at(fd, name, path)) return real(fd, name, flags);
    lock();
    int result = real(fd, name, flags);
    if (!result) record("unlink", 0, path, "", "", 0);
    unlock();
    return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int result = unlink(name);
    return result && errno == EISDIR ? rmdir(name) : result;
}
int mkdirat(int fd, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int (*real)(int, const char *, mode_t) = dlsym(RTLD_NEXT, "mkdirat");
    if (!at(fd, name, path)) return real(fd, name, mode);
    lock();
    int result = real(fd, name, mode);
    if (!result) record("mkdir", 0, path, "", "", 0);
    unlock();
    return result;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

static int flushed(int fd, const char *call, const char *name) {
    char path[PATH_MAX] = "";
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, call);
    if (!of(fd, path) && strcmp(name, "sync")) return real(fd);
    lock();
    int result = real(fd);
    if (!result) record(name, 0, path, "", "", 0);
    unlock();
    return result;
}
int fsync(int fd) { return flushed(fd, "fsync", "fsync"); }
int fdatasync(int fd) { return flushed(fd, "fdatasync", "fsync"); }
int syncfs(int fd) { return flushed(fd, "syncfs", "sync"); }
