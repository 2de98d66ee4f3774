/* What is due, soonest first: a binary heap of timers that live inside their owners.
 *
 * Rules of this file: a timer that is not in the heap has index -1; the owner frees nothing before
 * `timers_remove`.
 */
#ifndef EPDCTL_BENCH_TIMERS_H
#define EPDCTL_BENCH_TIMERS_H

#include "wire.h"

typedef struct {
    uint64_t due_us;
    int index;
} timer;

static struct {
    timer **slots;
    int length, capacity;
} timers;

static inline void timers_put(int index, timer *t) {
    timers.slots[index] = t;
    t->index = index;
}

static inline void timers_swap(int a, int b) {
    timer *first = timers.slots[a], *second = timers.slots[b];
    timers_put(a, second);
    timers_put(b, first);
}

static inline void timers_rise(int index) {
    while (index && timers.slots[index]->due_us < timers.slots[(index - 1) / 2]->due_us) {
        timers_swap(index, (index - 1) / 2);
        index = (index - 1) / 2;
    }
}

static inline void timers_sink(int index) {
    for (;;) {
        int least = index;
        for (int child = 2 * index + 1; child <= 2 * index + 2; child++) {
            if (child < timers.length && timers.slots[child]->due_us < timers.slots[least]->due_us) least = child;
        }
        if (least == index) return;
        timers_swap(index, least);
        index = least;
    }
}

static inline void timers_add(timer *t) {
    if (timers.length == timers.capacity) {
        timers.capacity = timers.capacity ? timers.capacity * 2 : 256;
        timers.slots = realloc(timers.slots, (size_t)timers.capacity * sizeof *timers.slots);
    }
    timers_put(timers.length, t);
    timers_rise(timers.length++);
}

static inline void timers_remove(timer *t) {
    int index = t->index;
    if (index < 0) return;
    t->index = -1;
    if (--timers.length == index) return;
    timers_put(index, timers.slots[timers.length]);
    timers_rise(index);
    timers_sink(index);
}

#endif
