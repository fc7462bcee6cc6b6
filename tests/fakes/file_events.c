/* Counts what a process does to files below one folder, and makes one of these events fail, or kills the process before it.
 *
 * Preloaded (LD_PRELOAD): it stands between the program and the C library. Armed by a call of `file_events_arm`, or by the
 * environment: FILE_EVENTS_ROOT, FILE_EVENTS_AT and FILE_EVENTS_ERROR.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long at, count;
static int failure; /* an errno, or 0: SIGKILL */

void file_events_arm(const char *folder, long number, int error) {
    snprintf(root, sizeof root, "%s", folder);
    at = number;
    failure = error;
    count = 0;
}

long file_events_count(void) { return count; }

__attribute__((constructor)) static void from_environment(void) {
    const char *folder = getenv("FILE_EVENTS_ROOT");
    if (folder)
        file_events_arm(folder, atol(getenv("FILE_EVENTS_AT")), atoi(getenv("FILE_EVENTS_ERROR")));
}

/* Whether this event is the one that fails; where it is to kill, it does not return. */
static int fails(const char *path) {
    if (!root[0] || strncmp(path, root, strlen(root)) || ++count != at)
        return 0;
    if (!failure) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
    errno = failure;
    return 1;
}

static int fails_at(int folder, const char *path) {
    char whole[2 * PATH_MAX], above[PATH_MAX], link[64];
    if (path[0] == '/')
        return fails(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(above, sizeof above))
            return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, above, sizeof above - 1);
        if (length < 0)
            return 0;
        above[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", above, path);
    return fails(whole);
}

static int fails_on(int handle) {
    char link[64], path[PATH_MAX];
    int before = errno;
    if (!root[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        return fails_at(AT_FDCWD, path) ? -1 : REAL(name)(path, flags, mode);                                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        return fails_at(folder, path) ? -1 : REAL(name)(folder, path, flags, mode);                                    \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int handle, const void *data, size_t size) {
    return fails_on(handle) ? -1 : REAL(write)(handle, data, size);
}
ssize_t pwrite(int handle, const void *data, size_t size, off_t start) {
    return fails_on(handle) ? -1 : REAL(pwrite)(handle, data, size, start);
}
ssize_t pwrite64(int handle, const void *data, size_t size, off64_t start) {
    return fails_on(handle) ? -1 : REAL(pwrite64)(handle, data, size, start);
}
ssize_t writev(int handle, const struct iovec *data, int pieces) {
    return fails_on(handle) ? -1 : REAL(writev)(handle, data, pieces);
}
int fsync(int handle) { return fails_on(handle) ? -1 : REAL(fsync)(handle); }
int ftruncate(int handle, off_t size) { return fails_on(handle) ? -1 : REAL(ftruncate)(handle, size); }
int ftruncate64(int handle, off64_t size) { return fails_on(handle) ? -1 : REAL(ftruncate64)(handle, size); }
int rename(const char *from, const char *to) { return fails_at(AT_FDCWD, to) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    return fails_at(b, to) ? -1 : REAL(renameat)(a, from, b, to);
}
int unlink(const char *path) { return fails_at(AT_FDCWD, path) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return fails_at(folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int mkdir(const char *path, mode_t mode) { return fails_at(AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }
int rmdir(const char *path) { return fails_at(AT_FDCWD, path) ? -1 : REAL(rmdir)(path); }
int chmod(const char *path, mode_t mode) { return fails_at(AT_FDCWD, path) ? -1 : REAL(chmod)(path, mode); }
int fchmodat(int folder, const char *path, mode_t mode, int flags) {
    return fails_at(folder, path) ? -1 : REAL(fchmodat)(folder, path, mode, flags);
}
