/* What the parts of the fake device share, and what a test sees of it and tells it.

   The fake device is a shared object for LD_PRELOAD. It stands in for the CUDA runtime, the CUDA driver and NCCL below
   torch's CUDA build: memory of the device is memory of the host, kernels compute nothing, and communicators move nothing.
   What is real is everything above: torch's process groups with their locks, threads and watchdogs, its allocators, and this
   project. So it shows control flow, order and what is left behind; it shows neither values nor times of a GPU.

   A test steers it through one file, which all processes of a job map: the variable FAKE_DEVICE has its path. device.py reads
   the names below from this file, so both sides have the same ones. */

#ifndef FAKE_DEVICE_H
#define FAKE_DEVICE_H

#include <stdatomic.h>
#include <stddef.h>

/* Each setting holds from the moment in which it is set until it is 0 again. Those of communicators may be limited to
   communicators of `world` members, and all may be limited to one process. "ms": milliseconds. */
#define SETTINGS(SETTING)                                                                       \
    SETTING(devices)         /* how many there are; 0: one */                                   \
    SETTING(reads_zeros)     /* copies from the device give zeros: the same values to every member, and to every check */ \
    SETTING(meets)           /* communicators and exchanges wait until all members came; 0: they wait for nobody */ \
    SETTING(init_hangs)      /* a communicator that is being made is not ready */               \
    SETTING(init_fails)      /* ... and ends with this ncclResult_t */                          \
    SETTING(init_ms)         /* ncclCommInitRankConfig itself takes so long */                  \
    SETTING(comm_fails)      /* a communicator that was ready reports this ncclResult_t */      \
    SETTING(launch_hangs)    /* ncclGroupEnd returns, but its launch stays in progress */       \
    SETTING(exchange_hangs)  /* what NCCL has launched does not end, but by an abort */         \
    SETTING(abort_in_vain)   /* ... nor by that */                                              \
    SETTING(abort_ms)        /* ncclCommAbort takes so long */                                  \
    SETTING(kernel_hangs)    /* a kernel that is launched now does not end */                   \
    SETTING(cuda_fails)      /* launches, queries and waits return this cudaError_t */

#define COUNTERS(COUNTER)                                                                       \
    COUNTER(launches)        /* kernels, those of NCCL left out */                              \
    COUNTER(waits)           /* of the host, for an event, a stream or a device */              \
    COUNTER(queries)         /* of an event or a stream */                                      \
    COUNTER(stream_waits)    /* of a stream for an event */                                     \
    COUNTER(streams)         /* made */                                                         \
    COUNTER(events)          /* made */                                                         \
    COUNTER(copies)                                                                             \
    COUNTER(copied_bytes)                                                                       \
    COUNTER(allocations)     /* of device memory; torch caches, so these are its segments */    \
    COUNTER(allocated_bytes)                                                                    \
    COUNTER(frees)                                                                              \
    COUNTER(host_allocations) /* of pinned memory */                                            \
    COUNTER(host_allocated_bytes)                                                               \
    COUNTER(host_frees)                                                                         \
    COUNTER(inits)           /* of communicators */                                             \
    COUNTER(sends)                                                                              \
    COUNTER(receives)                                                                           \
    COUNTER(sums)            /* ncclAllReduce */                                                \
    COUNTER(polls)           /* ncclCommGetAsyncError */                                        \
    COUNTER(aborts)          /* that have ended */                                              \
    COUNTER(destroys)                                                                           \
    COUNTER(used_after_free) /* uses of a communicator after its abort has freed it */

/* What is noted in order, with streams. */
#define NOTES(NOTE)                                                                             \
    NOTE(launch)      /* on `stream` */                                                         \
    NOTE(copy)        /* of `bytes` on `stream`; other: the cudaMemcpyKind */                   \
    NOTE(stream_wait) /* of `stream` for an event that was recorded on stream `other` */        \
    NOTE(record)      /* of an event on `stream` */                                             \
    NOTE(wait)        /* of the host for `stream`; for an event, the one on which it was recorded; -1: for a device */ \
    NOTE(exchange)    /* launched by NCCL on `stream`; other: how many members the communicator has */

#define NAME(name) name,
enum setting_name { SETTINGS(NAME) SETTINGS_COUNT };
#undef NAME
#define NAME(name) counted_##name,
enum counter_name { COUNTERS(NAME) COUNTERS_COUNT };
#undef NAME
#define NAME(name) noted_##name,
enum note_name { NOTES(NAME) NOTES_COUNT };
#undef NAME

#define DEVICES_MAX 8
#define MEMBERS_MAX 16
#define WORLDS_MAX 256
#define NOTES_MAX 8192

struct setting {
    atomic_int value, pid, world, unused;
};

struct note {
    int kind, pid;
    long stream, other, bytes;
};

/* How far the members of one communicator are; only `meets` asks for it. */
struct world {
    atomic_long serial, joined, launched[MEMBERS_MAX];
};

/* The file. The order of its parts is known to device.py. */
struct control {
    struct setting settings[SETTINGS_COUNT];
    atomic_long counters[COUNTERS_COUNT];
    atomic_long touched[DEVICES_MAX]; /* calls that make a context on this device, if it has none */
    atomic_long noted;                /* how many notes were made; only the first NOTES_MAX are kept */
    struct note notes[NOTES_MAX];
    atomic_long worlds_made;
    struct world worlds[WORLDS_MAX];
};

struct control *control(void);

/* Whether the process was given a file; without one it has no device. */
int is_there(void);

/* The value of a setting for this process, and for a communicator of so many members (0: for none). */
int setting(enum setting_name name, int world);

void count(enum counter_name name, long more);
void note(enum note_name kind, long stream, long other, long bytes);

/* Sleep. */
void nap(int ms);

/* Something that may have to happen before a stream can go on: the end of a kernel. Streams and events keep pointers to
   gates, so a gate is never freed; the process of a test is short. */
struct gate {
    int (*open)(struct gate *); /* called with the lock of the streams held */
    void *comm;                 /* NCCL's gates: which communicator, and the number of the launch in it */
    long launched;
};

/* Queue something on a stream that goes on when the gate is open. */
void enqueue(void *stream, struct gate *gate);

#endif
