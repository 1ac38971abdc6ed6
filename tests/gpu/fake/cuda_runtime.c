/* The CUDA runtime of the fake device: what torch calls of it. All that is not here is the real runtime's, which says that
   there is no driver. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "fake_device.h"

#define UNUSED __attribute__((unused))
#define ROUNDED(bytes) (((bytes) + 511) / 512 * 512)
#define ASK_AGAIN_MS 1
#define MEMORY_BYTES (8ull << 30)
#define DEVICE_WAITS -1

static __thread int current_device;

static void touch(void) {
    control()->touched[current_device]++;
}

/* What a driver reports of a broken device is reported by every call after it. */
static cudaError_t state(void) {
    return (cudaError_t)setting(cuda_fails, 0);
}

/* ---------------------------------------------------------------------------------------------- streams and events

   A queue has the gates of which the last thing in it, and so everything before, has to wait. A kernel of which nothing is to
   be waited for is over when it is launched, and leaves no gate. */

struct queue {
    int count, room;
    struct gate **gates;
};

struct stream {
    struct queue queue;
    int device;
    struct stream *next;
};

struct event {
    struct queue queue;
    long stream;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream default_streams[DEVICES_MAX];
static struct stream *all_streams;

static struct stream *stream_of(cudaStream_t handle) {
    /* cudaStreamLegacy and cudaStreamPerThread are 1 and 2. */
    return (size_t)handle <= 2 ? &default_streams[current_device] : (struct stream *)handle;
}

static void prune(struct queue *queue) {
    int kept = 0;
    for (int i = 0; i < queue->count; i++)
        if (!queue->gates[i]->open(queue->gates[i]))
            queue->gates[kept++] = queue->gates[i];
    queue->count = kept;
}

static void add(struct queue *queue, struct gate *gate) {
    for (int i = 0; i < queue->count; i++)
        if (queue->gates[i] == gate)
            return;
    if (queue->count == queue->room) {
        queue->room = queue->room ? 2 * queue->room : 8;
        queue->gates = realloc(queue->gates, queue->room * sizeof *queue->gates);
    }
    queue->gates[queue->count++] = gate;
}

static void add_all(struct queue *queue, const struct queue *more) {
    prune(queue);
    for (int i = 0; i < more->count; i++)
        add(queue, more->gates[i]);
}

void enqueue(void *stream, struct gate *gate) {
    pthread_mutex_lock(&lock);
    prune(&stream_of(stream)->queue);
    add(&stream_of(stream)->queue, gate);
    pthread_mutex_unlock(&lock);
}

static int is_over(struct queue *queue) {
    pthread_mutex_lock(&lock);
    prune(queue);
    int over = queue->count == 0;
    pthread_mutex_unlock(&lock);
    return over;
}

static cudaError_t query(struct queue *queue) {
    count(counted_queries, 1);
    return state() ? state() : is_over(queue) ? cudaSuccess : cudaErrorNotReady;
}

static cudaError_t await(struct queue *queue, long stream) {
    count(counted_waits, 1);
    note(noted_wait, stream, 0, 0);
    while (!is_over(queue) && !state())
        nap(ASK_AGAIN_MS);
    return state();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags UNUSED, int priority UNUSED) {
    touch();
    count(counted_streams, 1);
    struct stream *stream = calloc(1, sizeof *stream);
    stream->device = current_device;
    pthread_mutex_lock(&lock);
    stream->next = all_streams;
    all_streams = stream;
    pthread_mutex_unlock(&lock);
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *made) {
    return cudaStreamCreateWithPriority(made, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream UNUSED) {
    return cudaSuccess; /* events and all_streams may still point to it */
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream UNUSED, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return query(&stream_of(stream)->queue);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return await(&stream_of(stream)->queue, (long)stream);
}

cudaError_t cudaDeviceSynchronize(void) {
    struct queue all = {0};
    pthread_mutex_lock(&lock);
    add_all(&all, &default_streams[current_device].queue);
    for (struct stream *stream = all_streams; stream; stream = stream->next)
        if (stream->device == current_device)
            add_all(&all, &stream->queue);
    pthread_mutex_unlock(&lock);
    cudaError_t result = await(&all, DEVICE_WAITS);
    free(all.gates);
    return result;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags UNUSED) {
    struct event *event = (struct event *)handle;
    count(counted_stream_waits, 1);
    note(noted_stream_wait, (long)stream, event->stream, 0);
    pthread_mutex_lock(&lock);
    add_all(&stream_of(stream)->queue, &event->queue);
    pthread_mutex_unlock(&lock);
    return state();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream UNUSED, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream UNUSED, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph UNUSED,
                                     const cudaGraphNode_t **dependencies UNUSED,
                                     const cudaGraphEdgeData **edges UNUSED, size_t *dependency_count UNUSED) {
    *status = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags UNUSED) {
    touch();
    count(counted_events, 1);
    *made = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *made) {
    return cudaEventCreateWithFlags(made, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    free(event->queue.gates);
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    struct event *event = (struct event *)handle;
    note(noted_record, (long)stream, 0, 0);
    pthread_mutex_lock(&lock);
    event->queue.count = 0;
    add_all(&event->queue, &stream_of(stream)->queue);
    event->stream = (long)stream;
    pthread_mutex_unlock(&lock);
    return state();
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags UNUSED) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return query(&((struct event *)event)->queue);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return await(&((struct event *)event)->queue, ((struct event *)event)->stream);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin UNUSED, cudaEvent_t end UNUSED) {
    *ms = 0;
    return state();
}

/* ----------------------------------------------------------------------------------------------------------- kernels */

static int is_over_by_setting(struct gate *gate UNUSED) {
    return !setting(kernel_hangs, 0);
}

static struct gate endless = {.open = is_over_by_setting};

static cudaError_t launch(cudaStream_t stream) {
    count(counted_launches, 1);
    note(noted_launch, (long)stream, 0, 0);
    if (setting(kernel_hangs, 0))
        enqueue(stream, &endless);
    return state();
}

cudaError_t cudaLaunchKernel(const void *function UNUSED, dim3 grid UNUSED, dim3 block UNUSED, void **arguments UNUSED,
                             size_t shared_bytes UNUSED, cudaStream_t stream) {
    return launch(stream);
}

/* What the compiler makes of <<<...>>>, and no header for C declares. */
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel UNUSED, dim3 grid UNUSED, dim3 block UNUSED, void **arguments UNUSED,
                               size_t shared_bytes UNUSED, cudaStream_t stream) {
    return launch(stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function UNUSED, void **arguments UNUSED) {
    return launch(config->stream);
}

cudaError_t cudaGetLastError(void) {
    return state();
}

cudaError_t cudaPeekAtLastError(void) {
    return state();
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function UNUSED) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function UNUSED, enum cudaFuncAttribute attribute UNUSED, int value UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function UNUSED, int size UNUSED,
                                                          size_t shared_bytes UNUSED) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function UNUSED,
                                                                   int size UNUSED, size_t shared_bytes UNUSED,
                                                                   unsigned flags UNUSED) {
    *blocks = 2;
    return cudaSuccess;
}

/* ------------------------------------------------------------------------------------------------------------ memory */

struct block {
    char *begin;
    size_t bytes;
    enum cudaMemoryType type;
    int device;
    struct block *next;
};

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;

static cudaError_t allocate(void **made, size_t bytes, enum cudaMemoryType type) {
    struct block *block = malloc(sizeof *block);
    *block = (struct block){aligned_alloc(512, ROUNDED(bytes)), bytes, type, current_device, NULL};
    if (!block->begin) {
        free(block);
        return cudaErrorMemoryAllocation;
    }
    pthread_mutex_lock(&blocks_lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&blocks_lock);
    *made = block->begin;
    return cudaSuccess;
}

static void release(void *begin) {
    pthread_mutex_lock(&blocks_lock);
    for (struct block **place = &blocks; *place; place = &(*place)->next)
        if ((*place)->begin == begin) {
            struct block *block = *place;
            *place = block->next;
            free(block->begin);
            free(block);
            break;
        }
    pthread_mutex_unlock(&blocks_lock);
}

cudaError_t cudaMalloc(void **made, size_t bytes) {
    touch();
    count(counted_allocations, 1);
    count(counted_allocated_bytes, bytes);
    return allocate(made, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *begin) {
    count(counted_frees, begin != NULL);
    release(begin);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **made, size_t bytes, unsigned flags UNUSED) {
    count(counted_host_allocations, 1);
    count(counted_host_allocated_bytes, bytes);
    return allocate(made, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaMallocHost(void **made, size_t bytes) {
    return cudaHostAlloc(made, bytes, 0);
}

cudaError_t cudaFreeHost(void *begin) {
    count(counted_host_frees, 1);
    release(begin);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *begin UNUSED, size_t bytes UNUSED, unsigned flags UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *begin UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes); /* type 0: unregistered memory of the host */
    pthread_mutex_lock(&blocks_lock);
    for (struct block *block = blocks; block; block = block->next)
        if (block->begin <= (const char *)pointer && (const char *)pointer < block->begin + block->bytes) {
            attributes->type = block->type;
            attributes->device = block->device;
            attributes->devicePointer = attributes->hostPointer = (void *)pointer;
        }
    pthread_mutex_unlock(&blocks_lock);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = MEMORY_BYTES;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    count(counted_copies, 1);
    count(counted_copied_bytes, bytes);
    note(noted_copy, (long)stream, kind, bytes);
    if (kind == cudaMemcpyDeviceToHost && setting(reads_zeros, 0))
        memset(to, 0, bytes);
    else
        memmove(to, from, bytes);
    return state();
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, NULL);
    return cudaStreamSynchronize(NULL);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t bytes,
                                cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemsetAsync(void *begin, int value, size_t bytes, cudaStream_t stream UNUSED) {
    memset(begin, value, bytes);
    return state();
}

cudaError_t cudaMemset(void *begin, int value, size_t bytes) {
    return cudaMemsetAsync(begin, value, bytes, NULL);
}

/* ----------------------------------------------------------------------------------------------------------- devices */

cudaError_t cudaGetDeviceCount(int *devices_count) {
    if (!is_there())
        return cudaErrorNoDevice;
    *devices_count = setting(devices, 0) ? setting(devices, 0) : 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    int there = 0;
    cudaGetDeviceCount(&there);
    if (device < 0 || device >= there || device >= DEVICES_MAX)
        return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "fake device");
    properties->uuid.bytes[0] = (char)(device + 1);
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = MEMORY_BYTES;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->sharedMemPerBlock = 48 << 10;
    properties->regsPerBlock = 64 << 10;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 0xffff;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device UNUSED) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device UNUSED, int peer UNUSED) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer UNUSED, unsigned flags UNUSED) {
    return cudaSuccess;
}

/* What there is of the driver is in this library, too. */
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version UNUSED,
                                             unsigned long long flags UNUSED,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *function = dlsym(RTLD_DEFAULT, symbol);
    if (status)
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
