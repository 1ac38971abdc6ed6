/* NCCL of the fake device: communicators that are ready, hang or fail as the settings say. They move nothing. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"

/* nccl.h includes these, for no declaration that is used here; they need a C++ header that not every CUDA wheel has. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#include "nccl.h"

#define UNUSED __attribute__((unused))
/* Between the end of the kernels and that of the communicator: real aborts take a moment for both. */
#define FREES_MS 3

struct ncclComm {
    int world_size, rank;
    atomic_int aborted, freed, launch_waits;
    struct world *world;
    long serial;
};

static int all_came(struct ncclComm *comm) {
    return comm->world->serial != comm->serial || comm->world->joined == (1L << comm->world_size) - 1;
}

/* ncclInProgress while it is being made or while something is launched; ncclSuccess; or an error. */
static ncclResult_t state_of(struct ncclComm *comm) {
    int n = comm->world_size, error;
    if (comm->aborted)
        return ncclInternalError;
    if ((error = setting(init_fails, n)) || (error = setting(comm_fails, n)))
        return error;
    if (setting(init_hangs, n))
        return ncclInProgress; /* and the others do not see it either */
    atomic_fetch_or(&comm->world->joined, 1L << comm->rank);
    if (setting(meets, n) && !all_came(comm))
        return ncclInProgress;
    if (comm->launch_waits && setting(launch_hangs, n))
        return ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static __thread char text[64];
    snprintf(text, sizeof text, "result %d of the fake NCCL", result);
    return text;
}

const char *ncclGetLastError(ncclComm_t comm UNUSED) {
    return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    long serial = ++control()->worlds_made;
    struct world *world = &control()->worlds[serial % WORLDS_MAX];
    world->joined = 0;
    for (int rank = 0; rank < MEMBERS_MAX; rank++)
        world->launched[rank] = 0;
    world->serial = serial;
    memset(id, 0, sizeof *id);
    memcpy(id, &serial, sizeof serial);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int world_size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config UNUSED) {
    count(counted_inits, 1);
    if (world_size > MEMBERS_MAX)
        return ncclInvalidArgument;
    nap(setting(init_ms, world_size));
    struct ncclComm *comm = calloc(1, sizeof *comm);
    comm->world_size = world_size;
    comm->rank = rank;
    memcpy(&comm->serial, &id, sizeof comm->serial);
    comm->world = &control()->worlds[comm->serial % WORLDS_MAX];
    *made = comm;
    return state_of(comm) == ncclSuccess ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    count(counted_polls, 1);
    if (!comm || comm->freed) {
        count(counted_used_after_free, 1);
        return ncclInvalidArgument;
    }
    *result = state_of(comm);
    if (*result == ncclSuccess)
        comm->launch_waits = 0;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    nap(setting(abort_ms, comm->world_size));
    comm->aborted = 1;
    nap(FREES_MS);
    comm->freed = 1; /* its memory stays, so that a later use can be counted */
    count(counted_aborts, 1);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm UNUSED) {
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    count(counted_destroys, 1);
    comm->freed = 1;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *world_size) {
    *world_size = comm->world_size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

/* ------------------------------------------------------------------------------------------------------------ launches

   All calls of a group are one launch: one gate on their stream. */

static int is_over(struct gate *gate) {
    struct ncclComm *comm = gate->comm;
    struct world *world = comm->world;
    if (comm->aborted)
        return !setting(abort_in_vain, comm->world_size);
    if (setting(exchange_hangs, comm->world_size))
        return 0;
    if (setting(meets, comm->world_size) && world->serial == comm->serial)
        for (int rank = 0; rank < comm->world_size; rank++)
            if (world->launched[rank] < gate->launched)
                return 0;
    return 1;
}

static __thread int group_depth;
static __thread struct ncclComm *grouped;
static __thread cudaStream_t grouped_on;

static ncclResult_t launch(void) {
    struct ncclComm *comm = grouped;
    grouped = NULL;
    if (!comm)
        return ncclSuccess;
    if (comm->freed) {
        count(counted_used_after_free, 1);
        return ncclInvalidArgument;
    }
    struct gate *gate = calloc(1, sizeof *gate);
    gate->open = is_over;
    gate->comm = comm;
    gate->launched = ++comm->world->launched[comm->rank];
    note(noted_exchange, (long)grouped_on, comm->world_size, 0);
    enqueue(grouped_on, gate);
    if (!setting(launch_hangs, comm->world_size))
        return ncclSuccess;
    comm->launch_waits = 1;
    return ncclInProgress;
}

static ncclResult_t call(struct ncclComm *comm, cudaStream_t stream) {
    if (grouped && (grouped != comm || grouped_on != stream)) {
        fputs("fake device: a group of calls has two communicators or streams\n", stderr);
        abort();
    }
    grouped = comm;
    grouped_on = stream;
    return group_depth ? ncclSuccess : launch();
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    return --group_depth ? ncclSuccess : launch();
}

ncclResult_t ncclSend(const void *from UNUSED, size_t elements UNUSED, ncclDataType_t type UNUSED, int peer UNUSED,
                      ncclComm_t comm, cudaStream_t stream) {
    count(counted_sends, 1);
    return call(comm, stream);
}

ncclResult_t ncclRecv(void *to UNUSED, size_t elements UNUSED, ncclDataType_t type UNUSED, int peer UNUSED,
                      ncclComm_t comm, cudaStream_t stream) {
    count(counted_receives, 1);
    return call(comm, stream);
}

ncclResult_t ncclAllReduce(const void *from UNUSED, void *to UNUSED, size_t elements UNUSED, ncclDataType_t type UNUSED,
                           ncclRedOp_t operation UNUSED, ncclComm_t comm, cudaStream_t stream) {
    count(counted_sums, 1);
    return call(comm, stream);
}
