/* Preloaded into the sidecar: its wall clock reads so many seconds more as the file of PD_E2E_CLOCK says (an int64,
   mapped, so that it can step while the process runs). The monotonic clock stays what it is, as in a real step. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void attach(void) {
  const char *path = getenv("PD_E2E_CLOCK");
  int fd = path ? open(path, O_RDONLY) : -1;
  if (fd < 0) abort();
  void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) abort();
  offset_s = page;
  close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  int failed = (int)syscall(SYS_clock_gettime, clock, at);
  if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset_s;
  return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
