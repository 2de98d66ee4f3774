/* What the mock and the load generator share: a clock, growable buffers, and header look-ups.
 *
 * Rules of this file: static inline only, no state.
 */
#ifndef EPDCTL_BENCH_WIRE_H
#define EPDCTL_BENCH_WIRE_H

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define STAMP_LENGTH 19 /* "T=" + 16 digits + ";" */

/* Monotonic microseconds; both programs run on one machine, so stamps compare. */
static inline uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

typedef struct {
    char *data;
    size_t length, capacity;
} buffer;

/* Make room for `more` bytes and a final NUL. */
static inline void buffer_reserve(buffer *b, size_t more) {
    size_t wanted = b->length + more + 1;
    if (wanted <= b->capacity) return;
    b->capacity = wanted + wanted / 2;
    b->data = realloc(b->data, b->capacity);
    if (!b->data) {
        perror("realloc");
        exit(1);
    }
}

static inline void buffer_append(buffer *b, const char *data, size_t length) {
    buffer_reserve(b, length);
    memcpy(b->data + b->length, data, length);
    b->length += length;
    b->data[b->length] = 0;
}

/* Drop `length` bytes from the front. */
static inline void buffer_consume(buffer *b, size_t length) {
    memmove(b->data, b->data + length, b->length - length);
    b->length -= length;
}

/* Return the value of a header in a NUL-terminated head, or NULL; `name` ends with its colon. */
static inline const char *header_value(const char *head, const char *name) {
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        if (!strncasecmp(line + 2, name, strlen(name))) return line + 2 + strlen(name);
    }
    return NULL;
}

#endif
