// Phases of small jobs, taken one by one, with no lock: models/team.py says how.
//
// It does not know what a job is. The one trick: whoever waits asks memory for what the next phases will read.
#pragma once
#include <sched.h>

#include "lanes.h"

constexpr i64 PHASE_STRIDE = 128, PATIENCE = 2000;

struct Ahead { const char *next, *stop; };

INLINE i64 take(i64 phase) { return __atomic_fetch_add((i64 *)phase, 1, __ATOMIC_ACQ_REL); }

INLINE void breathe() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Report `num_done` jobs, wait until all are done, and return the next phase's address.
static i64 finish(i64 phase, i64 num_jobs, i64 num_done, Ahead *ahead) {
    i64 *done = (i64 *)(phase + 64);
    if (num_done) __atomic_fetch_add(done, num_done, __ATOMIC_ACQ_REL);
    for (i64 looks = 1; __atomic_load_n(done, __ATOMIC_ACQUIRE) < num_jobs; looks++) {
        if (ahead->next < ahead->stop) {
            for (int line = 0; line < 4; line++) __builtin_prefetch(ahead->next + 64 * line, 0, 2);
            ahead->next += 256;
        } else {
            breathe();
        }
        if (looks % PATIENCE == 0) sched_yield();
    }
    return phase + PHASE_STRIDE;
}
