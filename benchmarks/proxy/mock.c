/* Mock encode, prefill and decode instances for proxy benchmarks: one thread, epoll, three ports.
 *
 *     mock BASE_PORT        encode on BASE_PORT, prefill on BASE_PORT + 1, decode on BASE_PORT + 2
 *
 *   POST, "stream":true in the body   SSE: "max_tokens" chunks, "seed" microseconds apart, then [DONE]
 *   POST, anything else               one JSON answer in the shape of the role
 *   GET /_stats                       what each role received so far
 *   GET, anything else                200 with a JSON object that satisfies health and model probes
 *
 * Every chunk carries "T=<16 digits>;", the monotonic microsecond at which it was written.
 * It must stay cheaper than any proxy: bodies are scanned for quotes with memchr, never parsed.
 */
#include "scan.h"
#include "timers.h"
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum role { ENCODE, PREFILL, DECODE, ROLES };
static const char *const ROLE_NAMES[ROLES] = {"encode", "prefill", "decode"};

enum { CHUNK_BYTES = 200, MAX_EVENTS = 512, MAX_ITEMS = 256, TURN_BUDGET = 4096 };

typedef struct {
    timer stream; /* first member: a due timer is its connection; index -1: no stream is running */
    int fd;
    enum role role;
    bool is_listener, is_closed, wants_write;
    buffer in, out, body;
    size_t head_length, body_length, chunk_at;
    bool is_chunked;
    long chunks_left;
    uint64_t period_us;
} connection;

static struct {
    unsigned long requests, bytes, items, embeds, streams;
} counters[ROLES];

static int poller;

/* --- writing --- */

static void close_connection(connection *c) {
    if (c->is_closed) return;
    timers_remove(&c->stream);
    close(c->fd);
    c->is_closed = true;
}

static void watch(connection *c, bool for_write) {
    if (c->wants_write == for_write) return;
    c->wants_write = for_write;
    struct epoll_event event = {.events = EPOLLIN | (for_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void flush_output(connection *c) {
    size_t sent = 0;
    while (sent < c->out.length) {
        ssize_t n = send(c->fd, c->out.data + sent, c->out.length - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) {
            close_connection(c);
            return;
        }
        sent += (size_t)n;
    }
    buffer_consume(&c->out, sent);
    watch(c, c->out.length > 0);
}

static void write_out(connection *c, const char *data, size_t length) {
    if (c->is_closed) return;
    if (!c->out.length) {
        ssize_t n = send(c->fd, data, length, MSG_NOSIGNAL);
        if (n == (ssize_t)length) return;
        if (n < 0 && errno != EAGAIN) {
            close_connection(c);
            return;
        }
        if (n > 0) data += n, length -= (size_t)n;
    }
    buffer_append(&c->out, data, length);
    watch(c, true);
}

static void write_answer(connection *c, const char *body, int length) {
    char head[128];
    int n = sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n", length);
    buffer whole = {0};
    buffer_append(&whole, head, (size_t)n);
    buffer_append(&whole, body, (size_t)length);
    write_out(c, whole.data, whole.length);
    free(whole.data);
}

/* --- answers --- */

static const char PROBE_ANSWER[] =
    "{\"status\":\"ok\",\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,"
    "\"owned_by\":\"mock\",\"root\":\"mock\",\"max_model_len\":131072}],\"model_path\":\"mock\","
    "\"served_model_name\":\"mock\",\"is_generation\":true,\"version\":\"0.33.0\",\"dp_size\":1}";

static const char COMPLETION[] =
    "{\"id\":\"chatcmpl-m\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":[{"
    "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The quick brown fox jumps over the lazy dog. "
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog.\"},"
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],"
    "\"usage\":{\"prompt_tokens\":64,\"total_tokens\":96,\"completion_tokens\":32}";

static const char KV_PARAMETERS[] =
    ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_engine_id\":\"p0\","
    "\"remote_block_ids\":[[1,2,3,4]],\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1}";

static void answer_stats(connection *c) {
    char body[1024];
    int n = sprintf(body, "{");
    for (int role = 0; role < ROLES; role++) {
        n += sprintf(body + n,
                     "%s\"%s\":{\"requests\":%lu,\"bytes\":%lu,\"items\":%lu,\"embeds\":%lu,\"streams\":%lu}",
                     role ? "," : "", ROLE_NAMES[role], counters[role].requests, counters[role].bytes,
                     counters[role].items, counters[role].embeds, counters[role].streams);
    }
    n += sprintf(body + n, "}");
    write_answer(c, body, n);
}

/* One entry per item, named by the uuid it came with, as an encoder reports. */
static void answer_encode(connection *c, const char *body, const char *end, unsigned long items) {
    char answer[MAX_ITEMS * 192 + 512];
    int n = sprintf(answer,
                    "{\"id\":\"chatcmpl-e\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":[],"
                    "\"usage\":{\"prompt_tokens\":64,\"total_tokens\":64,\"completion_tokens\":0},"
                    "\"ec_transfer_params\":{");
    const char *at = body;
    for (unsigned long i = 0; i < items && i < MAX_ITEMS; i++) {
        char name[80];
        const char *uuid = at ? next_key(at, end, "\"uuid\"") : NULL;
        const char *open = uuid ? memchr(uuid, '"', (size_t)(end - uuid)) : NULL;
        const char *close = open ? memchr(open + 1, '"', (size_t)(end - open - 1)) : NULL;
        if (close && close - open - 1 < (long)sizeof name) {
            sprintf(name, "%.*s", (int)(close - open - 1), open + 1);
        } else {
            sprintf(name, "item-%lu-%lu", counters[ENCODE].requests, i);
        }
        at = close;
        n += sprintf(answer + n, "%s\"%s\":{\"item_indices\":[%lu],\"metadata\":{\"image_grid_thw\":[1,16,16]}}",
                     i ? "," : "", name, i);
    }
    n += sprintf(answer + n, "}}");
    write_answer(c, answer, n);
}

static void start_stream(connection *c, const char *body, const char *end) {
    static const char HEAD[] =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    counters[c->role].streams++;
    c->chunks_left = number_of(body, end, "\"max_tokens\"", 100);
    c->period_us = (uint64_t)number_of(body, end, "\"seed\"", 10000);
    write_out(c, HEAD, sizeof HEAD - 1);
    c->stream.due_us = now_us() + c->period_us;
    if (!c->is_closed) timers_add(&c->stream);
}

static void write_chunk(connection *c) {
    static const char END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", TAIL[] = "\"},\"finish_reason\":null}]}\n\n";
    if (c->chunks_left-- <= 0) {
        write_out(c, END, sizeof END - 1);
        return;
    }
    char event[CHUNK_BYTES + 256], frame[CHUNK_BYTES + 300];
    int n = sprintf(event,
                    "data: {\"id\":\"chatcmpl-m\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock\","
                    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"T=%016llu;",
                    (unsigned long long)now_us());
    while (n < CHUNK_BYTES - (int)sizeof TAIL + 1) event[n++] = 'x';
    n += sprintf(event + n, "%s", TAIL);
    int length = sprintf(frame, "%x\r\n%.*s\r\n", n, n, event);
    write_out(c, frame, (size_t)length);
}

static void serve(connection *c, const char *head, const char *body, size_t length) {
    const char *end = body + length;
    if (!strncmp(head, "GET /_stats", 11)) {
        answer_stats(c);
        return;
    }
    if (strncmp(head, "POST", 4)) {
        write_answer(c, PROBE_ANSWER, sizeof PROBE_ANSWER - 1);
        return;
    }
    unsigned long items = count_key(body, end, "\"image_url\"");
    counters[c->role].requests++;
    counters[c->role].bytes += length;
    counters[c->role].items += items;
    if (c->role == ENCODE) {
        answer_encode(c, body, end, items);
        return;
    }
    counters[c->role].embeds += count_key(body, end, "\"image_embeds\"");
    if (is_true(body, end, "\"stream\"")) {
        start_stream(c, body, end);
        return;
    }
    char answer[1024];
    write_answer(c, answer, sprintf(answer, "%s%s}", COMPLETION, c->role == PREFILL ? KV_PARAMETERS : ""));
}

/* --- requests --- */

static bool read_head(connection *c) {
    char *end = memmem(c->in.data, c->in.length, "\r\n\r\n", 4);
    if (!end) return false;
    *end = 0;
    const char *length = header_value(c->in.data, "content-length:");
    c->head_length = (size_t)(end + 4 - c->in.data);
    c->body_length = length ? strtoul(length, NULL, 10) : 0;
    c->is_chunked = header_value(c->in.data, "transfer-encoding:") != NULL;
    c->chunk_at = c->head_length;
    c->body.length = 0;
    if (header_value(c->in.data, "expect:")) write_out(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    return true;
}

/* Move whole chunks into `body`; true when the last one was there. */
static bool read_chunks(connection *c) {
    for (;;) {
        char *at = c->in.data + c->chunk_at;
        char *line = memmem(at, c->in.length - c->chunk_at, "\r\n", 2);
        if (!line) return false;
        size_t size = strtoul(at, NULL, 16), start = (size_t)(line + 2 - c->in.data);
        if (c->in.length < start + size + 2) return false;
        buffer_append(&c->body, c->in.data + start, size);
        c->chunk_at = start + size + 2;
        if (!size) return true;
    }
}

/* Serve as many whole requests as have arrived; a running stream holds back the next one. */
static void serve_arrived(connection *c) {
    while (!c->is_closed && c->stream.index < 0 && c->in.length) {
        if (!c->head_length && !read_head(c)) return;
        size_t used = c->head_length + c->body_length;
        if (c->is_chunked) {
            if (!read_chunks(c)) return;
            serve(c, c->in.data, c->body.data, c->body.length);
            used = c->chunk_at;
        } else {
            if (c->in.length < used) return;
            serve(c, c->in.data, c->in.data + c->head_length, c->body_length);
        }
        if (c->is_closed) return;
        buffer_consume(&c->in, used);
        c->head_length = 0;
    }
}

static void receive(connection *c) {
    for (;;) {
        size_t whole = c->head_length && !c->is_chunked ? c->head_length + c->body_length : 0;
        size_t room = whole > c->in.length + 65536 ? whole - c->in.length : 65536;
        buffer_reserve(&c->in, room);
        ssize_t n = recv(c->fd, c->in.data + c->in.length, room, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) close_connection(c);
        if (n <= 0) return;
        c->in.length += (size_t)n;
        c->in.data[c->in.length] = 0;
        serve_arrived(c);
        if (c->is_closed || (size_t)n < room) return;
    }
}

static void accept_all(connection *listener) {
    int fd, on = 1;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->role = listener->role;
        c->stream.index = -1;
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void listen_on(connection *listener, enum role role, int port) {
    int on = 1;
    *listener = (connection){.role = role, .is_listener = true, .stream.index = -1};
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener->fd, (struct sockaddr *)&address, sizeof address) || listen(listener->fd, 4096)) {
        perror("mock: bind");
        exit(1);
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener->fd, &event);
}

/* --- the loop --- */

static void free_connection(connection *c) {
    free(c->in.data);
    free(c->out.data);
    free(c->body.data);
    free(c);
}

static void handle(const struct epoll_event *event) {
    connection *c = event->data.ptr;
    if (c->is_listener) {
        accept_all(c);
        return;
    }
    if (event->events & EPOLLOUT) flush_output(c);
    if (!c->is_closed && event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
    if (c->is_closed) free_connection(c);
}

static void write_due_chunks(void) {
    uint64_t now = now_us();
    for (int budget = TURN_BUDGET; budget && timers.length && timers.slots[0]->due_us <= now; budget--) {
        connection *c = (connection *)timers.slots[0];
        bool was_last = c->chunks_left <= 0;
        write_chunk(c);
        if (c->is_closed) {
            free_connection(c);
        } else if (was_last) {
            timers_remove(&c->stream);
            serve_arrived(c);
            if (c->is_closed) free_connection(c);
        } else {
            c->stream.due_us += c->period_us;
            timers_sink(0);
        }
    }
}

static int wait_events(struct epoll_event *events) {
    struct timespec pause = {0};
    if (timers.length) {
        uint64_t now = now_us(), due = timers.slots[0]->due_us, left = due > now ? due - now : 0;
        pause = (struct timespec){(time_t)(left / 1000000), (long)(left % 1000000) * 1000};
    }
    return epoll_pwait2(poller, events, MAX_EVENTS, timers.length ? &pause : NULL, NULL);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: mock BASE_PORT\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(0);
    connection listeners[ROLES];
    for (int role = 0; role < ROLES; role++) listen_on(&listeners[role], (enum role)role, atoi(argv[1]) + role);
    struct epoll_event events[MAX_EVENTS];
    for (;;) {
        int count = wait_events(events);
        for (int i = 0; i < count; i++) handle(&events[i]);
        write_due_chunks();
    }
}
