/* Finding keys in a JSON body without parsing it: megabytes of base64 are skipped at memory speed.
 *
 * Rules of this file: a key is its quoted name followed by a colon, wherever it stands; good enough for the
 * bodies that the benchmark itself makes.
 */
#ifndef EPDCTL_BENCH_SCAN_H
#define EPDCTL_BENCH_SCAN_H

#include "wire.h"

#include <ctype.h>
#include <stdbool.h>

/* Return the next `"key"` followed by a colon at or after `at`, as the place after the colon, or NULL. */
static inline const char *next_key(const char *at, const char *end, const char *quoted) {
    size_t length = strlen(quoted);
    while ((at = memchr(at, '"', (size_t)(end - at)))) {
        if ((size_t)(end - at) > length && !memcmp(at, quoted, length)) {
            const char *after = at + length;
            while (after < end && *after == ' ') after++;
            if (after < end && *after == ':') return after + 1;
        }
        at++;
    }
    return NULL;
}

static inline unsigned long count_key(const char *body, const char *end, const char *quoted) {
    unsigned long count = 0;
    while ((body = next_key(body, end, quoted))) count++;
    return count;
}

static inline const char *skip_spaces(const char *at, const char *end) {
    while (at < end && *at == ' ') at++;
    return at;
}

static inline long number_of(const char *body, const char *end, const char *quoted, long fallback) {
    const char *value = next_key(body, end, quoted);
    if (!value) return fallback;
    value = skip_spaces(value, end);
    return value < end && isdigit((unsigned char)*value) ? strtol(value, NULL, 10) : fallback;
}

static inline bool is_true(const char *body, const char *end, const char *quoted) {
    const char *value = next_key(body, end, quoted);
    if (!value) return false;
    value = skip_spaces(value, end);
    return end - value >= 4 && !memcmp(value, "true", 4);
}

#endif
