/*
 * The benchmark's rig: two stub engines (prefill, decode) and the load generator in one process on one
 * epoll loop, so that they cost a fraction of the proxy they measure and never wait for one another.
 * It knows HTTP/1.1 framing, time and CPU clocks. It must not know JSON, vLLM or any proxy: every byte it
 * sends was made by payloads.py and is handed over in files.
 *
 * usage: rig CANNED_FILE        (listens on two free loopback ports and prints them as one JSON line)
 * Then one command per line on stdin, one JSON line per command on stdout:
 *   load KIND PATH              KIND: request, prefill, decode, stream (its head), events
 *   closed port= conns= warm_ms= ms= pause_us= max_requests= pids=
 *   stream port= streams= rate= step= warm_ms= ms= pids=
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { HOLE = 16, HEAD_MAX = 16384, EVENT_MAX = 1024, CONNS_MAX = 16384, PIDS_MAX = 64, CARRY = 31, STARTING_MAX = 32 };
#define NS 1000000000ULL
#define MS 1000000ULL
static const char HOLE_MARK[] = "@@@@@@@@@@@@@@@@";   /* replaced by a counter, so that no two ids are equal */
static const char STAMP_MARK[] = "t=";                /* before the 16 hex digits of an event's send time */
static const uint64_t GUARD_NS = 30 * NS;            /* a proxy that hangs ends the run, never the bench */

struct template { char *bytes; size_t len; size_t hole; bool has_hole; };
struct event { uint32_t len, stamp; const char *bytes; };
struct canned { char *key; char *bytes; uint32_t len; };

enum kind { LISTEN_PREFILL, LISTEN_DECODE, SERVE_PREFILL, SERVE_DECODE, CLIENT, CONTROL };
enum state { HEAD, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

struct conn {
    int fd;
    enum kind kind;
    bool want_out, connecting, busy, dead;
    /* parser */
    enum state state;
    char head[HEAD_MAX];
    size_t head_len;
    uint64_t remain;
    int status, line_len;
    bool chunked, close_after, line_empty;
    char key[300];
    /* what a stub looks for in a request, what a client looks for in a stream */
    const char *marker;
    bool marker_seen, marker_checked;
    char carry[CARRY];
    size_t carry_len;
    /* output: a template with its hole filled, or loose bytes (stream events) */
    const struct template *out;
    size_t out_off;
    char hole[HOLE];
    char *loose;
    size_t loose_len, loose_cap;
    /* client: start of the request; stub: next event of the stream */
    uint64_t begun_ns, due_ns;
    uint32_t event_no;
    bool streaming, measured, first_seen;
    struct conn *next;
};

struct run {
    bool stream, step, issuing, measuring;
    int port, conns, npids, pids[PIDS_MAX];
    uint64_t rate, warm_ns, window_ns, pause_ns, max_requests;
    uint64_t issued, done, errors, reconnects, inflight, bytes_in, clean_ends, stalled_events, chunks, first_seen;
    uint64_t prefills, decodes, handoffs, handoffs_checked, overlapping;
    int first_bad_status;
    uint64_t *samples_ns, nsamples, cap_samples;
};

static struct template t_request, t_prefill, t_decode, t_stream_head, t_not_found, t_stream_end;
static struct event *events;
static uint32_t nevents;
static struct canned *canned;
static uint32_t ncanned;
static struct run run;
static int ep, port_prefill, port_decode;
static uint64_t counter, big_requests;
static struct conn *clients[CONNS_MAX];
static struct conn *timer_head, *timer_tail;   /* every timer of a run has the same delay: a queue is enough */
static char scratch[1 << 18];

static void die(const char *what) { fprintf(stderr, "rig: %s: %s\n", what, strerror(errno)); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS + (uint64_t)t.tv_nsec;
}

/* CPU time of a whole process, its ended threads included, to the nanosecond: /proc/PID/stat has 10 ms ticks.
 * The clock id is the kernel's encoding (clock_getcpuclockid(3)). */
static uint64_t cpu_ns(int pid) {
    struct timespec t;
    clockid_t id;
    if (clock_getcpuclockid(pid, &id) != 0 || clock_gettime(id, &t) != 0) return 0;
    return (uint64_t)t.tv_sec * NS + (uint64_t)t.tv_nsec;
}

static uint64_t cpu_of_proxy_ns(void) {
    uint64_t sum = 0;
    for (int i = 0; i < run.npids; i++) sum += cpu_ns(run.pids[i]);
    return sum;
}

/* How long a process's threads were runnable while their core ran somebody else: the noise of the machine,
 * exact where /proc/stat's 10 ms ticks are not. Field 2 of schedstat (Documentation/scheduler/sched-stats). */
static uint64_t waited_ns(int pid) {
    char path[320];
    uint64_t sum = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *d = opendir(path);
    if (!d) return 0;
    struct dirent *entry;
    while ((entry = readdir(d))) {
        unsigned long long ran, waited;
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/schedstat", pid, entry->d_name);
        FILE *f = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (!f) continue;
        if (fscanf(f, "%llu %llu", &ran, &waited) == 2) sum += waited;
        fclose(f);
    }
    closedir(d);
    return sum;
}

static uint64_t proxy_waited_ns(void) {
    uint64_t sum = 0;
    for (int i = 0; i < run.npids; i++) sum += waited_ns(run.pids[i]);
    return sum;
}

static char *read_file(const char *path, size_t *len) {
    FILE *f = fopen(path, "rb");
    if (!f) die(path);
    fseek(f, 0, SEEK_END);
    *len = (size_t)ftell(f);
    rewind(f);
    char *bytes = malloc(*len + 1);
    if (!bytes || fread(bytes, 1, *len, f) != *len) die(path);
    bytes[*len] = 0;
    fclose(f);
    return bytes;
}

static void set_template(struct template *t, char *bytes, size_t len) {
    free(t->bytes);
    char *hole = memmem(bytes, len, HOLE_MARK, HOLE);
    *t = (struct template){.bytes = bytes, .len = len, .hole = hole ? (size_t)(hole - bytes) : len, .has_hole = hole};
}

static void literal(struct template *t, const char *text) { set_template(t, strdup(text), strlen(text)); }

static void to_hex(char *out, uint64_t v) {
    for (int i = HOLE - 1; i >= 0; i--, v >>= 4) out[i] = "0123456789abcdef"[v & 15];
}

/* ---------------------------------------------------------------- output */

static void watch(struct conn *c, bool out) {
    if (c->want_out == out) return;
    c->want_out = out;
    struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static int segments(struct conn *c, struct iovec *v) {
    const struct template *t = c->out;
    size_t off = c->out_off;
    struct iovec all[3] = {{t->bytes, t->hole}, {c->hole, t->has_hole ? HOLE : 0},
                           {t->bytes + t->hole + HOLE, t->has_hole ? t->len - t->hole - HOLE : 0}};
    int n = 0;
    for (int i = 0; i < 3; i++) {
        if (off >= all[i].iov_len) { off -= all[i].iov_len; continue; }
        v[n].iov_base = (char *)all[i].iov_base + off;
        v[n++].iov_len = all[i].iov_len - off;
        off = 0;
    }
    return n;
}

/* Returns false if the peer is gone. */
static bool flush(struct conn *c) {
    while (c->out) {
        struct iovec v[3];
        int n = segments(c, v);
        if (!n) { c->out = NULL; break; }
        struct msghdr m = {.msg_iov = v, .msg_iovlen = (size_t)n};
        ssize_t sent = sendmsg(c->fd, &m, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN && errno != ENOTCONN) return false;
            watch(c, true);
            return true;
        }
        c->out_off += (size_t)sent;
        if (c->out_off >= c->out->len) c->out = NULL;
    }
    while (c->loose_len) {
        ssize_t sent = send(c->fd, c->loose, c->loose_len, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) return false;
            watch(c, true);
            return true;
        }
        c->loose_len -= (size_t)sent;
        memmove(c->loose, c->loose + sent, c->loose_len);
    }
    watch(c, false);
    return true;
}

static bool answer(struct conn *c, const struct template *t) {
    if (c->out) run.overlapping++;
    c->out = t;
    c->out_off = 0;
    if (t->has_hole) to_hex(c->hole, ++counter);
    return flush(c);
}

static bool send_loose(struct conn *c, const char *bytes, size_t len) {
    if (c->out || c->loose_len) {
        enum { LOOSE_MAX = 1 << 16 };
        if (c->loose_len + len > LOOSE_MAX) { run.stalled_events++; return true; }
        if (!c->loose) c->loose = malloc(LOOSE_MAX);
        memcpy(c->loose + c->loose_len, bytes, len);
        c->loose_len += len;
        return true;
    }
    ssize_t sent = send(c->fd, bytes, len, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return false;
    size_t done = sent < 0 ? 0 : (size_t)sent;
    if (done == len) return true;
    c->out_off = 0;
    if (!c->loose) c->loose = malloc(1 << 16);
    memcpy(c->loose, bytes + done, len - done);
    c->loose_len = len - done;
    watch(c, true);
    return true;
}

/* ---------------------------------------------------------------- connections */

static struct conn *add(int fd, enum kind kind) {
    struct conn *c = calloc(1, sizeof *c);
    if (!c) die("calloc");
    c->fd = fd;
    c->kind = kind;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)) die("epoll_ctl");
    return c;
}

/* Freed at the end of the loop turn: the same turn may still hold an event or a timer of it. */
static struct conn *graveyard;
static void bury(struct conn *c) {
    if (c->dead) return;
    c->dead = true;
    close(c->fd);
    if (!c->due_ns) { c->next = graveyard; graveyard = c; }   /* else the timer queue lets go of it */
}

static void timer(struct conn *c, uint64_t due) {
    c->due_ns = due;
    c->next = NULL;
    if (timer_tail) timer_tail->next = c; else timer_head = c;
    timer_tail = c;
}

static void clear_timers(void) {
    while (timer_head) {
        struct conn *c = timer_head;
        timer_head = c->next;
        c->due_ns = 0;
        c->streaming = false;
        if (c->dead) { c->next = graveyard; graveyard = c; }
    }
    timer_tail = NULL;
}

static int connect_to(int port) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (connect(fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS) die("connect");
    return fd;
}

static int listen_on(int *port) {
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = 0, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&a, &n)) die("listen");
    *port = ntohs(a.sin_port);
    return fd;
}

static void issue(struct conn *c) {
    if (!run.issuing || (run.max_requests && run.issued >= run.max_requests)) return;
    run.issued++;
    run.inflight++;
    c->busy = true;
    c->measured = run.measuring;
    c->begun_ns = now_ns();
    answer(c, &t_request);
}

static void client_lost(struct conn *c) {
    for (int i = 0; i < run.conns; i++)
        if (clients[i] == c) {
            if (c->busy) { run.inflight--; run.errors++; }
            bury(c);
            if (run.errors > 200) run.issuing = false;   /* a proxy that refuses everything: say so, do not spin */
            clients[i] = NULL;
            if (run.issuing && !run.stream) {
                run.reconnects++;
                clients[i] = add(connect_to(run.port), CLIENT);
                issue(clients[i]);
            }
            return;
        }
    bury(c);
}

/* ---------------------------------------------------------------- messages */

static void sample(uint64_t ns) {
    if (run.nsamples == run.cap_samples) {
        run.cap_samples = run.cap_samples ? run.cap_samples * 2 : 1 << 16;
        run.samples_ns = realloc(run.samples_ns, run.cap_samples * sizeof *run.samples_ns);
        if (!run.samples_ns) die("realloc");
    }
    run.samples_ns[run.nsamples++] = ns;
}

static bool start_stream(struct conn *c) {
    c->streaming = true;
    uint64_t period = NS / run.rate, now = now_ns();
    /* All streams of one engine step leave together, as a real engine sends them (step=1), or evenly spread
     * over the period by the golden ratio, which costs a proxy one wake-up each (step=0). */
    static uint64_t nth;
    uint64_t phase = run.step ? period - now % period : (++nth * 0x9E3779B97F4A7C15ULL >> 32) * period >> 32;
    c->event_no = (uint32_t)(nth * 7919);
    if (!answer(c, &t_stream_head)) return false;
    /* The queue must stay sorted: a new stream waits for its place by insertion. */
    c->due_ns = now + phase;
    struct conn **at = &timer_head;
    while (*at && (*at)->due_ns <= c->due_ns) at = &(*at)->next;
    c->next = *at;
    *at = c;
    if (!c->next) timer_tail = c;
    return true;
}

static bool request_done(struct conn *c) {
    static const char *const splittable[] = {"POST /v1/chat/completions", "POST /v1/completions"};
    for (size_t i = 0; i < 2; i++)
        if (!strcmp(c->key, splittable[i])) {
            if (c->kind == SERVE_PREFILL) {
                run.prefills++;
                return answer(c, &t_prefill);
            }
            run.decodes++;
            run.handoffs_checked += c->marker_checked;
            run.handoffs += c->marker_checked && c->marker_seen;
            return run.stream ? start_stream(c) : answer(c, &t_decode);
        }
    for (uint32_t i = 0; i < ncanned; i++)
        if (!strcmp(c->key, canned[i].key)) {
            static struct template t[64];
            t[i % 64] = (struct template){.bytes = canned[i].bytes, .len = canned[i].len, .hole = canned[i].len};
            return answer(c, &t[i % 64]);
        }
    static char unknown[64][300];
    static int nunknown;
    for (int i = 0; i < nunknown; i++) if (!strcmp(unknown[i], c->key)) return answer(c, &t_not_found);
    if (nunknown < 64) {
        memcpy(unknown[nunknown++], c->key, sizeof c->key);
        fprintf(stderr, "rig: 404 for %s\n", c->key);
    }
    return answer(c, &t_not_found);
}

static bool response_done(struct conn *c) {
    uint64_t now = now_ns();
    run.inflight--;
    c->busy = false;
    if (c->status != 200) {
        run.errors++;
        if (!run.first_bad_status) run.first_bad_status = c->status;
        if (run.errors > 200) run.issuing = false;
    } else {
        run.done += c->measured;
        run.clean_ends++;
        if (!run.stream && c->measured) sample(now - c->begun_ns);
    }
    if (c->close_after) return false;
    if (run.stream) return true;
    if (run.pause_ns) timer(c, now + run.pause_ns); else issue(c);
    return true;
}

static void head_done(struct conn *c, size_t len) {
    char *head = c->head;
    head[len - 2] = 0;
    c->chunked = c->close_after = false;
    c->remain = 0;
    char *line = strchr(head, '\n');
    if (c->kind == CLIENT) {
        c->status = len > 12 ? atoi(head + 9) : 0;
    } else {
        char *end = strpbrk(strchr(head, ' ') ? strchr(head, ' ') + 1 : head, " ?\r");
        size_t n = end ? (size_t)(end - head) : 0;
        if (n >= sizeof c->key) n = sizeof c->key - 1;
        memcpy(c->key, head, n);
        c->key[n] = 0;
    }
    while (line && *++line) {
        if (!strncasecmp(line, "content-length:", 15)) c->remain = strtoull(line + 15, NULL, 10);
        else if (!strncasecmp(line, "transfer-encoding:", 18)) c->chunked = strcasestr(line, "chunked");
        else if (!strncasecmp(line, "connection:", 11)) c->close_after = !strncasecmp(line + 12, "close", 5);
        else if (!strncasecmp(line, "expect:", 7) && c->kind != CLIENT) send_loose(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        line = strchr(line, '\n');
    }
    c->marker_seen = false;
    c->carry_len = 0;
    /* Scanning every byte of every big body would make the rig the bottleneck: one in eight is looked at. */
    c->marker_checked = c->kind == SERVE_DECODE && (c->chunked || c->remain <= 131072 || ++big_requests % 8 == 0);
    c->marker = c->kind == CLIENT && run.stream ? STAMP_MARK : c->marker_checked ? "\"do_remote_prefill\"" : NULL;
}

static void stamp_seen(struct conn *c, const char *digits) {
    uint64_t sent = 0;
    for (int i = 0; i < HOLE; i++) {
        int d = digits[i] - '0';
        if (d > 9) d = digits[i] - 'a' + 10;
        if (d < 0 || d > 15) return;
        sent = sent << 4 | (uint64_t)d;
    }
    if (!c->first_seen) { c->first_seen = true; run.first_seen++; }
    if (run.measuring) { run.chunks++; sample(now_ns() - sent); }
}

static void scan(struct conn *c, const char *p, size_t n) {
    size_t mark = strlen(c->marker), need = c->kind == CLIENT ? mark + HOLE : mark;
    char joint[2 * CARRY];
    while (n) {
        /* A mark cut in two by a read is found where the carried tail meets the new bytes. */
        if (c->carry_len) {
            size_t take = n < need - 1 ? n : need - 1;
            memcpy(joint, c->carry, c->carry_len);
            memcpy(joint + c->carry_len, p, take);
            size_t joint_len = c->carry_len + take, old = c->carry_len;
            char *at = memmem(joint, joint_len, c->marker, mark);
            if (at && (size_t)(at - joint) < old && (size_t)(at - joint) + need <= joint_len) {
                c->marker_seen = true;
                if (c->kind == CLIENT) stamp_seen(c, at + mark);
            } else if (joint_len < need) {
                memcpy(c->carry, joint, joint_len);
                c->carry_len = joint_len;
                return;
            }
            c->carry_len = 0;
        }
        const char *at = p, *end = p + n;
        while ((at = memmem(at, (size_t)(end - at), c->marker, mark)) && (size_t)(end - at) >= need) {
            c->marker_seen = true;
            if (c->kind != CLIENT) { c->marker = NULL; return; }
            stamp_seen(c, at + mark);
            at += need;
        }
        size_t keep = n < need - 1 ? n : need - 1;
        if (keep > CARRY) keep = CARRY;
        memcpy(c->carry, end - keep, keep);
        c->carry_len = keep;
        return;
    }
}

/* Returns false if the connection ends here. */
static bool feed(struct conn *c, const char *p, size_t n) {
    while (n) {
        bool done = false;
        if (c->state == HEAD) {
            size_t take = n < HEAD_MAX - c->head_len ? n : HEAD_MAX - c->head_len, before = c->head_len;
            if (!take) return false;
            memcpy(c->head + before, p, take);
            c->head_len += take;
            size_t from = before > 3 ? before - 3 : 0;
            char *end = memmem(c->head + from, c->head_len - from, "\r\n\r\n", 4);
            if (!end) return true;
            size_t len = (size_t)(end - c->head) + 4, used = len - before;
            head_done(c, len);
            c->head_len = 0;
            p += used;
            n -= used;
            if (c->kind == CLIENT && c->status >= 100 && c->status < 200) continue;
            if (c->chunked) c->state = CHUNK_SIZE, c->line_len = 0;
            else if (c->remain) c->state = BODY;
            else done = true;
        } else if (c->state == BODY || c->state == CHUNK_DATA) {
            size_t take = n < c->remain ? n : (size_t)c->remain;
            if (c->marker) scan(c, p, take);
            if (c->kind == CLIENT) run.bytes_in += take;
            p += take;
            n -= take;
            c->remain -= take;
            if (!c->remain) {
                if (c->state == BODY) done = true; else c->state = CHUNK_END;
            }
        } else if (c->state == CHUNK_SIZE) {
            char ch = *p++;
            n--;
            if (ch == '\n') {
                c->state = c->remain ? CHUNK_DATA : TRAILER;
                c->line_empty = true;
                c->line_len = 0;
            } else if (c->line_len++ < 16) {
                if (c->line_len == 1) c->remain = 0;
                if (ch >= '0' && ch <= '9') c->remain = c->remain << 4 | (uint64_t)(ch - '0');
                else if ((ch | 32) >= 'a' && (ch | 32) <= 'f') c->remain = c->remain << 4 | (uint64_t)((ch | 32) - 'a' + 10);
                else if (ch == ';') c->line_len = 17;
            }
        } else if (c->state == CHUNK_END) {
            if (*p == '\n') c->state = CHUNK_SIZE;
            p++;
            n--;
        } else {
            if (*p == '\n') {
                if (c->line_empty) done = true;
                c->line_empty = true;
            } else if (*p != '\r') c->line_empty = false;
            p++;
            n--;
        }
        if (done) {
            c->state = HEAD;
            if (!(c->kind == CLIENT ? response_done(c) : request_done(c))) return false;
            if (c->dead) return true;
        }
    }
    return true;
}

static void readable(struct conn *c) {
    ssize_t n = recv(c->fd, scratch, sizeof scratch, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || !feed(c, scratch, (size_t)n)) {
        if (c->kind == CLIENT) client_lost(c); else bury(c);
    }
}

/* ---------------------------------------------------------------- the loop */

static void fire(void) {
    uint64_t now;
    /* A few at a time: what comes back must be read, and its delay taken, while the rest goes out. */
    for (int budget = 16; budget && timer_head && timer_head->due_ns <= (now = now_ns()); budget--) {
        struct conn *c = timer_head;
        timer_head = c->next;
        if (!timer_head) timer_tail = NULL;
        uint64_t due = c->due_ns;
        c->due_ns = 0;
        if (c->dead) { c->next = graveyard; graveyard = c; continue; }
        if (c->kind == CLIENT) { issue(c); continue; }
        if (!run.stream || !c->streaming) continue;
        if (!run.issuing) {                      /* the run is over: a clean end of the stream */
            c->streaming = false;
            send_loose(c, t_stream_end.bytes, t_stream_end.len);
            continue;
        }
        const struct event *e = &events[c->event_no++ % nevents];
        char bytes[EVENT_MAX];
        memcpy(bytes, e->bytes, e->len);
        to_hex(bytes + e->stamp, now);
        if (!send_loose(c, bytes, e->len)) { bury(c); continue; }
        /* From the due time, so that a late turn is caught up and the rate holds. */
        timer(c, due + NS / run.rate);
    }
}

static void turn(uint64_t until_ns) {
    struct epoll_event e[512];
    uint64_t now = now_ns(), wake = until_ns;
    if (timer_head && timer_head->due_ns < wake) wake = timer_head->due_ns;
    uint64_t wait = wake > now ? wake - now : 0;
    struct timespec t = {.tv_sec = (time_t)(wait / NS), .tv_nsec = (long)(wait % NS)};
    int n = epoll_pwait2(ep, e, 512, &t, NULL);
    fire();
    for (int i = 0; i < n; i++) {
        struct conn *c = e[i].data.ptr;
        if (c->dead) continue;
        if (c->kind == LISTEN_PREFILL || c->kind == LISTEN_DECODE) {
            int fd, one = 1;
            while ((fd = accept4(c->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                add(fd, c->kind == LISTEN_PREFILL ? SERVE_PREFILL : SERVE_DECODE);
            }
            continue;
        }
        if (c->kind == CONTROL) continue;
        if (e[i].events & EPOLLOUT && !flush(c)) {
            if (c->kind == CLIENT) client_lost(c); else bury(c);
            continue;
        }
        if (e[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
    }
    while (graveyard) {
        struct conn *c = graveyard;
        graveyard = c->next;
        free(c->loose);
        free(c);
    }
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile_us(double p) {
    if (!run.nsamples) return 0;
    uint64_t at = (uint64_t)(p * (double)(run.nsamples - 1) + 0.5);
    return (double)run.samples_ns[at] / 1e3;
}

static void settle(uint64_t guard) { while (run.inflight && now_ns() < guard) turn(now_ns() + 20 * MS); }

static void measure(void) {
    uint64_t guard = now_ns() + run.warm_ns + run.window_ns + GUARD_NS;
    run.issuing = true;
    for (int i = 0; i < run.conns; i++) clients[i] = add(connect_to(run.port), CLIENT);
    for (int i = 0; i < run.conns; i++) {
        if (!clients[i]) clients[i] = add(connect_to(run.port), CLIENT);   /* the proxy closed it while others began */
        issue(clients[i]);
        /* Not one storm of 2,000 connections: what is measured is open streams, not their start. */
        while (run.stream && run.issued - run.first_seen >= STARTING_MAX && run.errors < 200 && now_ns() < guard)
            turn(now_ns() + MS);
    }
    if (run.stream)
        while (run.first_seen < (uint64_t)run.conns && run.errors < 200 && now_ns() < guard) turn(now_ns() + 20 * MS);
    uint64_t end = now_ns() + run.warm_ns;
    uint64_t max_requests = run.max_requests;
    run.max_requests = 0;
    while (now_ns() < end && run.issuing) turn(end);
    if (!run.stream) {
        bool go_on = run.issuing;
        run.issuing = false;
        settle(guard);
        run.issuing = go_on;
    }
    if (run.pause_ns) clear_timers();
    if (!run.stream) run.prefills = run.decodes = run.handoffs = run.handoffs_checked = 0;
    uint64_t missing = run.stream ? (uint64_t)run.conns - run.first_seen : 0;
    run.issued = run.bytes_in = 0;
    run.max_requests = max_requests;

    uint64_t cpu0 = cpu_of_proxy_ns(), own0 = cpu_ns(getpid()), wait0 = proxy_waited_ns(), own_wait0 = waited_ns(getpid()), t0 = now_ns();
    run.measuring = true;
    for (int i = 0; i < run.conns && !run.stream; i++) {
        if (!clients[i]) clients[i] = add(connect_to(run.port), CLIENT);   /* the proxy closed it in the warm-up */
        /* With pauses the connections must not beat together: their requests would queue behind one another. */
        if (run.pause_ns) timer(clients[i], t0 + run.pause_ns * (uint64_t)i / (uint64_t)run.conns);
        else issue(clients[i]);
    }
    end = t0 + run.window_ns;
    while (now_ns() < end && run.issuing && !(run.max_requests && run.issued >= run.max_requests)) turn(end);
    if (!run.stream) {
        run.issuing = false;
        settle(guard);
    }
    uint64_t cpu1 = cpu_of_proxy_ns(), own1 = cpu_ns(getpid()), wait1 = proxy_waited_ns(), own_wait1 = waited_ns(getpid()), t1 = now_ns();
    run.measuring = false;
    run.issuing = false;
    uint64_t ended_before = run.clean_ends;
    if (run.stream) settle(now_ns() + 20 * NS);
    bool hung = run.inflight > 0;

    qsort(run.samples_ns, run.nsamples, sizeof *run.samples_ns, by_value);
    double sum = 0;
    for (uint64_t i = 0; i < run.nsamples; i++) sum += (double)run.samples_ns[i];
    printf("{\"requests\": %llu, \"chunks\": %llu, \"errors\": %llu, \"first_bad_status\": %d, \"reconnects\": %llu, "
           "\"hung\": %llu, \"clean_stream_ends\": %llu, \"streams_missing\": %llu, \"stalled_events\": %llu, \"overlapping\": %llu, "
           "\"wall_s\": %.6f, \"proxy_cpu_s\": %.9f, \"rig_cpu_s\": %.9f, \"proxy_waited_s\": %.6f, \"rig_waited_s\": %.6f, "
           "\"prefills\": %llu, \"decodes\": %llu, \"handoffs\": %llu, \"handoffs_checked\": %llu, \"bytes_in\": %llu, "
           "\"samples\": %llu, \"mean_us\": %.3f, \"p50_us\": %.3f, \"p90_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f}\n",
           (unsigned long long)run.done, (unsigned long long)run.chunks, (unsigned long long)run.errors, run.first_bad_status,
           (unsigned long long)run.reconnects, (unsigned long long)(hung ? run.inflight : 0),
           (unsigned long long)(run.stream ? run.clean_ends - ended_before : 0),
           (unsigned long long)missing, (unsigned long long)run.stalled_events,
           (unsigned long long)run.overlapping, (double)(t1 - t0) / 1e9, (double)(cpu1 - cpu0) / 1e9,
           (double)(own1 - own0) / 1e9, (double)(wait1 - wait0) / 1e9, (double)(own_wait1 - own_wait0) / 1e9, (unsigned long long)run.prefills,
           (unsigned long long)run.decodes, (unsigned long long)run.handoffs, (unsigned long long)run.handoffs_checked,
           (unsigned long long)run.bytes_in, (unsigned long long)run.nsamples,
           run.nsamples ? sum / (double)run.nsamples / 1e3 : 0.0, percentile_us(0.5), percentile_us(0.9),
           percentile_us(0.99), percentile_us(1.0));
    fflush(stdout);

    clear_timers();
    for (int i = 0; i < run.conns; i++) if (clients[i]) { bury(clients[i]); clients[i] = NULL; }
    free(run.samples_ns);
    memset(&run, 0, sizeof run);
}

/* ---------------------------------------------------------------- control */

static uint64_t number(const char *line, const char *key, uint64_t otherwise) {
    char want[40];
    snprintf(want, sizeof want, " %s=", key);
    const char *at = strstr(line, want);
    return at ? strtoull(at + strlen(want), NULL, 10) : otherwise;
}

static void load_events(char *bytes, size_t len) {
    (void)len;
    memcpy(&nevents, bytes, 4);
    free(events);
    events = calloc(nevents, sizeof *events);
    char *at = bytes + 4;
    for (uint32_t i = 0; i < nevents; i++) {
        memcpy(&events[i].len, at, 4);
        memcpy(&events[i].stamp, at + 4, 4);
        events[i].bytes = at + 8;
        at += 8 + events[i].len;
        if (events[i].len > EVENT_MAX) die("an event is too long");
    }
}

static void command(char *line) {
    char kind[32], path[4000];
    size_t len;
    if (sscanf(line, "load %31s %3999s", kind, path) == 2) {
        char *bytes = read_file(path, &len);
        if (!strcmp(kind, "request")) set_template(&t_request, bytes, len);
        else if (!strcmp(kind, "prefill")) set_template(&t_prefill, bytes, len);
        else if (!strcmp(kind, "decode")) set_template(&t_decode, bytes, len);
        else if (!strcmp(kind, "stream")) set_template(&t_stream_head, bytes, len);
        else if (!strcmp(kind, "stream_end")) set_template(&t_stream_end, bytes, len);
        else if (!strcmp(kind, "events")) load_events(bytes, len);
        else die("unknown kind of file");
        puts("{}");
        fflush(stdout);
        return;
    }
    memset(&run, 0, sizeof run);
    run.stream = !strncmp(line, "stream", 6);
    if (!run.stream && strncmp(line, "closed", 6)) die("unknown command");
    run.port = (int)number(line, "port", 0);
    run.conns = (int)number(line, run.stream ? "streams" : "conns", 1);
    run.rate = number(line, "rate", 20);
    run.step = number(line, "step", 0);
    run.warm_ns = number(line, "warm_ms", 300) * MS;
    run.window_ns = number(line, "ms", 1000) * MS;
    run.pause_ns = number(line, "pause_us", 0) * 1000;
    run.max_requests = number(line, "max_requests", 0);
    if (run.conns > CONNS_MAX) die("too many connections");
    char *at = strstr(line, " pids=");
    if (at)
        for (char *p = at + 6; *p >= '0' && *p <= '9' && run.npids < PIDS_MAX;) {
            run.pids[run.npids++] = (int)strtol(p, &p, 10);
            if (*p == ',') p++;
        }
    measure();
}

int main(int argc, char **argv) {
    if (argc != 2) { fprintf(stderr, "usage: rig CANNED_FILE\n"); return 2; }
    size_t len;
    char *bytes = read_file(argv[1], &len), *at = bytes + 4;
    memcpy(&ncanned, bytes, 4);
    canned = calloc(ncanned, sizeof *canned);
    for (uint32_t i = 0; i < ncanned; i++) {
        uint32_t n;
        memcpy(&n, at, 4);
        canned[i].key = strndup(at + 4, n);
        at += 4 + n;
        memcpy(&canned[i].len, at, 4);
        canned[i].bytes = at + 4;
        at += 4 + canned[i].len;
    }
    literal(&t_not_found, "HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n{\"detail\":\"Not Found\"}");
    literal(&t_stream_end, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    literal(&t_request, "");
    literal(&t_prefill, t_not_found.bytes);
    literal(&t_decode, t_not_found.bytes);
    literal(&t_stream_head, t_not_found.bytes);

    ep = epoll_create1(EPOLL_CLOEXEC);
    add(listen_on(&port_prefill), LISTEN_PREFILL);
    add(listen_on(&port_decode), LISTEN_DECODE);
    printf("{\"prefill_port\": %d, \"decode_port\": %d}\n", port_prefill, port_decode);
    fflush(stdout);

    /* Between commands the stubs go on answering: proxies probe their engines. */
    fcntl(0, F_SETFL, O_NONBLOCK);
    add(0, CONTROL);
    static char line[8192];
    size_t have = 0;
    for (;;) {
        ssize_t n = read(0, line + have, sizeof line - 1 - have);
        if (n == 0) return 0;
        if (n > 0) have += (size_t)n;
        char *end;
        line[have] = 0;
        while ((end = strchr(line, '\n'))) {
            *end = 0;
            command(line);
            have -= (size_t)(end + 1 - line);
            memmove(line, end + 1, have + 1);
        }
        turn(now_ns() + NS);
    }
}
