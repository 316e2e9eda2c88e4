/* The exchange of rows between ranks on several hosts. Every two ranks have a TCP connection.
 *
 * Every rank sends and receives at the same time and never blocks on only sending or only receiving, so ranks cannot
 * deadlock. Each message begins with its round and shape, so a rank at another step causes an error and not a wrong
 * result. */
#include "intrinsics.h"
#include "ranks.h"
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* A rank polls TRIES times before it sleeps. A try takes about 0.5 us, so polling outlasts a usual network delay. If
 * the rank slept at once, it would wake up later than the rows arrive. */
enum { TRIES = 400, POLL_MS = 200, MOST_PARTS = 64 };

typedef struct {
    uint64_t round;
    uint32_t rows, bytes;
} Head;

typedef struct {
    const char *own;
    char *whole;
    long t, bytes, row;
    size_t length; /* bytes of a message, its head included */
    Head head;
} Round;

/* The bytes exchanged so far between this rank and one other rank in a round. */
typedef struct {
    size_t sent, received;
    Head head; /* the received head */
} Passed;

static int is_done(const Round *c, const Passed *p) { return p->sent == c->length && p->received == c->length; }

static ssize_t send_more(const Round *c, const Passed *p, int fd) {
    struct iovec parts[2];
    int count = 0;
    size_t in_rows = p->sent > sizeof(Head) ? p->sent - sizeof(Head) : 0;
    if (p->sent < sizeof(Head)) parts[count++] = (struct iovec){(char *)&c->head + p->sent, sizeof(Head) - p->sent};
    parts[count++] = (struct iovec){(char *)c->own + in_rows, c->length - sizeof(Head) - in_rows};
    return sendmsg(fd, &(struct msghdr){.msg_iov = parts, .msg_iovlen = count}, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static ssize_t receive_more(const Round *c, Passed *p, long rank, int fd) {
    struct iovec parts[MOST_PARTS];
    int count = 0;
    size_t at = p->received > sizeof(Head) ? p->received - sizeof(Head) : 0;
    if (p->received < sizeof(Head))
        parts[count++] = (struct iovec){(char *)&p->head + p->received, sizeof(Head) - p->received};
    for (; at < c->length - sizeof(Head) && count < MOST_PARTS; at += c->bytes - at % c->bytes) {
        long row = at / c->bytes, column = at % c->bytes;
        parts[count++] = (struct iovec){c->whole + row * c->row + rank * c->bytes + column, c->bytes - column};
    }
    return recvmsg(fd, &(struct msghdr){.msg_iov = parts, .msg_iovlen = count}, MSG_DONTWAIT);
}

static int is_another(const Round *c, const Passed *p) {
    const Head *got = &p->head, *own = &c->head;
    return p->received >= sizeof(Head) &&
           (got->round != own->round || got->rows != own->rows || got->bytes != own->bytes);
}

/* Records which rank was lost and why, which ends the exchange for all ranks. Returns 1. */
static int lose(Ranks *r, long rank, int error) {
    if (!r->header->gone) r->lost = rank, r->error = error;
    r->header->gone = 1;
    return 1;
}

/* Adds the result `bytes` of sendmsg or recvmsg to *sum. Returns the bytes moved, or -1 if the connection is closed or
 * broken. */
static ssize_t moved(Ranks *r, long rank, ssize_t bytes, size_t *sum) {
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    if (bytes <= 0) return -lose(r, rank, bytes ? errno : 0);
    *sum += bytes;
    return bytes;
}

/* Sends to and receives from another rank as much as is possible without blocking. Returns the bytes moved, or -1 if
 * the connection is closed or broken. */
static ssize_t move(Ranks *r, const Round *c, Passed *p, long rank) {
    ssize_t out = 0, in = 0;
    int fd = r->sockets[rank];
    if (p->sent < c->length) out = moved(r, rank, send_more(c, p, fd), &p->sent);
    if (out >= 0 && p->received < c->length) in = moved(r, rank, receive_more(c, p, rank, fd), &p->received);
    if (out < 0 || in < 0) return -1;
    return is_another(c, p) ? -lose(r, rank, EPROTO) : out + in;
}

static void sleep_until_ready(const Ranks *r, const Round *c, const Passed *passed) {
    struct pollfd waiting[RANKS_MAX];
    int count = 0;
    for (long i = 0; i < r->count; i++) {
        short events = (passed[i].sent < c->length ? POLLOUT : 0) | (passed[i].received < c->length ? POLLIN : 0);
        if (i != r->rank && events) waiting[count++] = (struct pollfd){.fd = r->sockets[i], .events = events};
    }
    poll(waiting, count, POLL_MS);
}

int swap_by_sockets(Ranks *r, const char *own, char *whole, long t, long bytes) {
    Round c = {own, whole, t, bytes, r->count * bytes, sizeof(Head) + t * bytes, {r->rounds, t, bytes}};
    Passed passed[RANKS_MAX] = {0};
    for (long tries = 0;;) {
        ssize_t sum = 0;
        int done = 1;
        if (r->header->gone) return 1;
        for (long i = 0; i < r->count; i++) {
            if (i == r->rank || is_done(&c, &passed[i])) continue;
            ssize_t one = move(r, &c, &passed[i], i);
            if (one < 0) return 1;
            sum += one, done &= is_done(&c, &passed[i]);
        }
        if (done) return 0;
        if (sum)
            tries = 0;
        else if (++tries < TRIES)
            spin();
        else
            sleep_until_ready(r, &c, passed);
    }
}
