/* Makes calls on files fail as told, for tests of a disk that breaks under a running process.
 *
 * DISK_FAULTS names a file of lines "<call> <errno> <part of the path> <how often, -1: always>", read at
 * every call, so that a test can break and mend the disk while the process runs. Counts are this
 * process's own and start again when the file's text changes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define RULES_MAX 16

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char seen[4096];
static int used[RULES_MAX];

static ssize_t rules(char *text, size_t size) {
    const char *path = getenv("DISK_FAULTS");
    if (path == NULL) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = syscall(SYS_read, fd, text, size - 1);
    syscall(SYS_close, fd);
    if (length < 0) length = 0;
    text[length] = 0;
    return length;
}

/* 0, or the errno with which this call is to fail. */
static int fault(const char *call, const char *path) {
    char text[4096], name[32], part[1024];
    int number, times, rule = 0, found = 0, saved = errno;
    if (rules(text, sizeof text) == 0) { errno = saved; return 0; }
    pthread_mutex_lock(&lock);
    if (strcmp(text, seen) != 0) {
        strcpy(seen, text);
        memset(used, 0, sizeof used);
    }
    for (char *line = text; line != NULL && *line != 0 && rule < RULES_MAX && !found; rule++) {
        char *next = strchr(line, '\n');
        if (next != NULL) *next++ = 0;
        if (sscanf(line, "%31s %d %1023s %d", name, &number, part, &times) == 4 && strcmp(name, call) == 0
            && strstr(path, part) != NULL && (times < 0 || used[rule] < times)) {
            used[rule]++;
            found = number;
        }
        line = next;
    }
    pthread_mutex_unlock(&lock);
    errno = saved;
    return found;
}

static int fault_of_handle(const char *call, int fd) {
    char link[64], path[1024];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return fault(call, path);
}

#define FAIL_IF(expression) do { int number = (expression); if (number) { errno = number; return -1; } } while (0)

ssize_t write(int fd, const void *data, size_t count) {
    FAIL_IF(fault_of_handle("write", fd));
    return REAL(write)(fd, data, count);
}

int fsync(int fd) {
    FAIL_IF(fault_of_handle("fsync", fd));
    return REAL(fsync)(fd);
}

int syncfs(int fd) {
    FAIL_IF(fault_of_handle("syncfs", fd));
    return REAL(syncfs)(fd);
}

int ftruncate(int fd, off_t length) {
    FAIL_IF(fault_of_handle("ftruncate", fd));
    return REAL(ftruncate)(fd, length);
}

int ftruncate64(int fd, off64_t length) {
    FAIL_IF(fault_of_handle("ftruncate", fd));
    return REAL(ftruncate64)(fd, length);
}

int rename(const char *from, const char *to) {
    FAIL_IF(fault("rename", from));
    return REAL(rename)(from, to);
}

int unlink(const char *path) {
    FAIL_IF(fault("unlink", path));
    return REAL(unlink)(path);
}

static int opened(const char *path, int flags) {
    return (flags & (O_WRONLY | O_RDWR)) ? fault("open", path) : 0;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    FAIL_IF(opened(path, flags));
    return REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    FAIL_IF(opened(path, flags));
    return REAL(open64)(path, flags, mode);
}
