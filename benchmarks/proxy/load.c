/* Closed-loop HTTP/1.1 load generator for proxy benchmarks: one thread, epoll.
 *
 *     load rps PORT BODY_FILE CONCURRENCY SECONDS     latency of each request
 *     load sse PORT BODY_FILE CONCURRENCY SECONDS     latency of each chunk (received minus its "T=" stamp), gaps
 *                                                     between chunks, time to the first one
 *
 * No request starts after SECONDS; those under way are finished and counted. Streams start spread over the
 * first fifth, and chunks count from the first quarter on. Prints one JSON object; times in microseconds.
 */
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_EVENTS = 512, RECEIVE_BYTES = 1 << 18, GIVE_UP_AFTER_US = 60000000, MAX_ERRORS = 1000 };
enum chunk_part { SIZE_LINE, DATA, DATA_END, TRAILER };

typedef struct {
    uint32_t *values;
    size_t length, capacity;
} samples;

typedef struct {
    int fd;
    bool is_busy, has_head, is_chunked, wants_write, is_first_chunk;
    uint64_t start_at, began, previous_chunk;
    size_t sent;
    buffer head;
    long content_length, received, chunk_left;
    enum chunk_part part;
    int status;
    char carry[STAMP_LENGTH];
    size_t carried;
} connection;

static samples latency, chunk_latency, gap, first_chunk;
static unsigned long errors, chunks_in_window, chunks_total;
static char last_error[200];
static char *request_head, *request_body;
static size_t head_length, body_length;
static bool is_sse;
static int poller, port;
static uint64_t window_from, window_to;

static void record(samples *s, uint64_t value) {
    if (s->length == s->capacity) {
        s->capacity = s->capacity ? s->capacity * 2 : 4096;
        s->values = realloc(s->values, s->capacity * sizeof *s->values);
    }
    s->values[s->length++] = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t quantile(const samples *s, double q) {
    return s->length ? s->values[(size_t)((double)(s->length - 1) * q)] : 0;
}

static void print_samples(const char *name, samples *s) {
    if (s->length) qsort(s->values, s->length, sizeof *s->values, compare);
    printf("\"%s\":{\"n\":%zu,\"p50\":%u,\"p90\":%u,\"p99\":%u,\"max\":%u},", name, s->length, quantile(s, .5),
           quantile(s, .9), quantile(s, .99), quantile(s, 1));
}

/* --- sending --- */

static void open_connection(connection *c) {
    int on = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) {
        perror("load: connect");
        exit(1);
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    c->wants_write = false;
}

static void watch(connection *c, bool for_write) {
    if (c->wants_write == for_write) return;
    c->wants_write = for_write;
    struct epoll_event event = {.events = EPOLLIN | (for_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void send_more(connection *c) {
    while (c->sent < head_length + body_length) {
        struct iovec pieces[2];
        struct msghdr message = {.msg_iov = pieces};
        size_t in_body = c->sent > head_length ? c->sent - head_length : 0;
        if (c->sent < head_length) {
            pieces[message.msg_iovlen++] = (struct iovec){request_head + c->sent, head_length - c->sent};
        }
        pieces[message.msg_iovlen++] = (struct iovec){request_body + in_body, body_length - in_body};
        ssize_t n = sendmsg(c->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN) watch(c, true);
            return; /* a broken connection shows when it is read */
        }
        c->sent += (size_t)n;
    }
    watch(c, false);
}

static void start_request(connection *c) {
    c->is_busy = true;
    c->has_head = false;
    c->is_first_chunk = true;
    c->sent = c->carried = c->head.length = 0;
    c->received = 0;
    c->previous_chunk = 0;
    c->part = SIZE_LINE;
    c->chunk_left = 0;
    c->began = now_us();
    send_more(c);
}

/* --- receiving --- */

static void take_stamp(connection *c, uint64_t stamp, uint64_t now) {
    bool counts = now >= window_from && now < window_to;
    chunks_total++;
    if (counts) {
        chunks_in_window++;
        record(&chunk_latency, now > stamp ? now - stamp : 0);
        if (c->previous_chunk) record(&gap, now - c->previous_chunk);
        if (c->is_first_chunk) record(&first_chunk, now - c->began);
    }
    c->is_first_chunk = false;
    c->previous_chunk = now;
}

/* Find the stamps in a piece of the body; one that is cut in two is carried over to the next piece. */
static void take_payload(connection *c, const char *data, size_t length, uint64_t now) {
    static char joined[RECEIVE_BYTES + STAMP_LENGTH];
    if (!is_sse) return;
    memcpy(joined, c->carry, c->carried);
    memcpy(joined + c->carried, data, length);
    const char *at = joined, *end = joined + c->carried + length, *rest = joined;
    while ((at = memmem(at, (size_t)(end - at), "T=", 2)) && end - at >= STAMP_LENGTH) {
        bool is_stamp = at[STAMP_LENGTH - 1] == ';';
        if (is_stamp) take_stamp(c, strtoull(at + 2, NULL, 10), now);
        at += is_stamp ? STAMP_LENGTH : 1;
        rest = at;
    }
    if (end - rest > STAMP_LENGTH - 1) rest = end - (STAMP_LENGTH - 1);
    c->carried = (size_t)(end - rest);
    memmove(c->carry, rest, c->carried);
}

/* Collect the head; returns what of the piece belongs to the body, or NULL while the head is not whole. */
static const char *take_head(connection *c, const char *data, size_t *length) {
    size_t before = c->head.length;
    buffer_append(&c->head, data, *length);
    char *end = memmem(c->head.data, c->head.length, "\r\n\r\n", 4);
    if (!end) return NULL;
    *end = 0;
    const char *given = header_value(c->head.data, "content-length:");
    c->has_head = true;
    c->status = atoi(c->head.data + 9);
    c->content_length = given ? atol(given) : -1;
    c->is_chunked = header_value(c->head.data, "transfer-encoding:") != NULL;
    size_t used = (size_t)(end + 4 - c->head.data) - before;
    *length -= used;
    if (c->status != 200) {
        snprintf(last_error, sizeof last_error, "%d %.*s", c->status, (int)(*length < 150 ? *length : 150), data + used);
    }
    return data + used;
}

static int hex_digit(char digit) {
    char lower = (char)(digit | 32);
    return lower >= '0' && lower <= '9' ? lower - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
}

/* Take one step within a chunked body; returns the bytes used, and sets `is_done` at its end. */
static size_t take_chunked(connection *c, const char *data, size_t length, uint64_t now, bool *is_done) {
    switch (c->part) {
    case SIZE_LINE:
        if (hex_digit(*data) >= 0) c->chunk_left = c->chunk_left * 16 + hex_digit(*data);
        if (*data == '\n') c->part = c->chunk_left ? DATA : TRAILER;
        return 1;
    case DATA: {
        size_t taken = length < (size_t)c->chunk_left ? length : (size_t)c->chunk_left;
        take_payload(c, data, taken, now);
        c->chunk_left -= (long)taken;
        if (!c->chunk_left) c->part = DATA_END;
        return taken;
    }
    case DATA_END:
        if (*data == '\n') c->part = SIZE_LINE;
        return 1;
    case TRAILER:
        *is_done = *data == '\n';
        return 1;
    }
    return length;
}

/* Take a piece of the response; true when the response is complete. */
static bool take_piece(connection *c, const char *data, size_t length, uint64_t now) {
    if (!c->has_head && !(data = take_head(c, data, &length))) return false;
    if (!c->is_chunked) {
        take_payload(c, data, length, now);
        c->received += (long)length;
        return c->received >= c->content_length;
    }
    bool is_done = false;
    while (length && !is_done) {
        size_t used = take_chunked(c, data, length, now, &is_done);
        data += used;
        length -= used;
    }
    return is_done;
}

/* --- the loop --- */

static int busy;

static void begin(connection *c) {
    busy++;
    start_request(c);
}

static void end_request(connection *c, bool is_good, uint64_t now) {
    if (is_good) {
        record(&latency, now - c->began);
    } else {
        errors++;
    }
    c->is_busy = false;
    busy--;
}

static void receive(connection *c, uint64_t *last_end) {
    static char piece[RECEIVE_BYTES];
    ssize_t n = recv(c->fd, piece, sizeof piece, MSG_DONTWAIT);
    uint64_t now = now_us();
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        close(c->fd);
        if (c->is_busy) {
            snprintf(last_error, sizeof last_error, "connection closed, errno %d", n < 0 ? errno : 0);
            end_request(c, false, now);
        }
        open_connection(c);
        if (now < window_to && errors < MAX_ERRORS) begin(c);
    } else if (c->is_busy && take_piece(c, piece, (size_t)n, now)) {
        end_request(c, c->status == 200, now);
        *last_end = now;
        if (now < window_to && errors < MAX_ERRORS) begin(c);
    }
}

/* Start the connections whose moment has come; returns how many still wait. */
static int start_waiting(connection *all, int count) {
    int waiting = 0;
    uint64_t now = now_us();
    for (int i = 0; i < count; i++) {
        if (!all[i].start_at) continue;
        if (all[i].start_at > now) {
            waiting++;
            continue;
        }
        all[i].start_at = 0;
        begin(&all[i]);
    }
    return waiting;
}

static uint64_t run(connection *all, int count) {
    struct epoll_event events[MAX_EVENTS];
    uint64_t last_end = now_us();
    int waiting = count;
    while (busy || waiting) {
        if (waiting) waiting = start_waiting(all, count);
        if (now_us() > window_to + GIVE_UP_AFTER_US) {
            errors += (unsigned long)busy;
            break;
        }
        int n = epoll_wait(poller, events, MAX_EVENTS, waiting ? 1 : 200);
        for (int i = 0; i < n; i++) {
            connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) send_more(c);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c, &last_end);
        }
    }
    return last_end;
}

static void read_body(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    body_length = (size_t)ftell(file);
    rewind(file);
    request_body = malloc(body_length + 1);
    if (fread(request_body, 1, body_length, file) != body_length) exit(1);
    fclose(file);
    request_head = malloc(256);
    head_length = (size_t)sprintf(request_head,
                                  "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                                  "Content-Type: application/json\r\nAccept: */*\r\nContent-Length: %zu\r\n\r\n",
                                  port, body_length);
}

static void print_result(double seconds) {
    for (char *c = last_error; *c; c++) {
        if (*c == '"' || *c == '\\' || (unsigned char)*c < 32) *c = '\'';
    }
    printf("{\"ok\":%zu,\"errors\":%lu,\"seconds\":%.4f,\"per_s\":%.2f,\"request_bytes\":%zu,", latency.length, errors,
           seconds, seconds > 0 ? (double)latency.length / seconds : 0, body_length);
    print_samples("latency", &latency);
    if (is_sse) {
        printf("\"chunks\":%lu,\"chunks_per_s\":%.1f,", chunks_total,
               (double)chunks_in_window * 1e6 / (double)(window_to - window_from));
        print_samples("chunk", &chunk_latency);
        print_samples("gap", &gap);
        print_samples("first_chunk", &first_chunk);
    }
    printf("\"last_error\":\"%s\"}\n", last_error);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: load rps|sse PORT BODY_FILE CONCURRENCY SECONDS\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    is_sse = !strcmp(argv[1], "sse");
    port = atoi(argv[2]);
    read_body(argv[3]);
    int count = atoi(argv[4]);
    double microseconds = atof(argv[5]) * 1e6;
    poller = epoll_create1(0);
    connection *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count; i++) open_connection(&all[i]);
    uint64_t began = now_us();
    window_to = began + (uint64_t)microseconds;
    window_from = is_sse ? began + (uint64_t)(microseconds / 4) : began;
    for (int i = 0; i < count; i++) {
        all[i].start_at = began + (is_sse ? (uint64_t)(microseconds / 5 * i / count) : 0);
    }
    uint64_t ended = run(all, count);
    print_result((double)(ended - began) / 1e6);
    return 0;
}
